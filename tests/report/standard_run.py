"""The record of a run at level standard on 8 GPUs, with all kinds of figures; and what a bad GPU 5 does to it."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model import levels
from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Limit
from pytest_gpufleet.model.metric import GiB, KiB, Measurement, MiB, Sample
from pytest_gpufleet.model.place import WORLD, Pair, gpu
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.verdict.judgement import LimitMissed, judge
from pytest_gpufleet.verdict.profile import Profile
from tests import runs

EACH, ALL = [gpu(index) for index in range(8)], [WORLD]
PAIRS = [Pair(one, other) for one in EACH for other in EACH if one != other]
START = 1795166043.0
CASES = {name: shipped().checks[name].cases for name in runs.SUITE.checks}
WITH_CASES = {name: msgspec.structs.replace(check, cases=CASES[name]) for name, check in runs.SUITE.checks.items()}
SUITE = replace(runs.SUITE, checks=WITH_CASES)

# nccl-tests' figures for a healthy machine with NVLS off, GB/s.
SIZES = (MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, GiB, 4 * GiB)
BUSBW = {
    "all_reduce": (21, 83, 245, 318.5, 346.3, 358.9, 365.2),
    "all_gather": (11, 66, 218, 285.3, 322.9, 343.5, 353.6),
    "reduce_scatter": (16, 64, 209, 291.1, 324.7, 345.2, 358.4),
    "broadcast": (12, 42, 149, 292.4, 346.0, 357.2, 361.5),
    "reduce": (11, 41, 151, 297.4, 349.1, 362.0, 365.5),
    "all_to_all": (7, 31, 158, 269.3, 305.2, 330.2, 342.0),
    "gather": (9, 33, 120, 240.1, 280.2, 301.0, 309.3),
    "scatter": (9, 34, 121, 241.0, 281.7, 300.4, 310.2),
    "sendrecv": (14, 55, 74, 80.9, 300.6, 359.5, 364.8),
}
JUDGED = (64 * MiB, GiB, 4 * GiB)
GEMM = {"fp32": 50.7, "tf32": 371.0, "fp16": 716.0, "bf16": 766.0, "fp8": 1398.0, "fp64": 60.1}
TRAINING = {"fp32": (925, 0.993), "tf32": (2114, 0.992), "amp": (6380, 0.972), "peak": (7562, 0.976)}
SOURCE = "8x NVIDIA H200, driver 580.159.04, NCCL 2.28.9, nccl-tests 2.19.6, 2026-11-20"


class Run:
    """A run in the making: every measurement is judged as in a real one, against limits made from healthy figures."""

    def __init__(self, topology, bad):
        self.topology = topology
        self.bad = bad  # metric -> the factor by which GPU 5, or what all GPUs do together, is off
        self.findings = []
        self.failed = {}
        self.faults = []
        self._noise = random.Random(5)

    def add(self, places, name, metric, value, required=True, **conditions):
        check = f"acceptance/{name}"
        samples = {place: self._samples(metric, place, value) for place in places}
        values = {place: sorted(three)[1] for place, three in samples.items()}
        details = {"computed": "in fp16 autocast, gradient scaling, channels_last"} if "recipe" in conditions else {}
        measurement = Measurement(metric, values, conditions, samples, details)
        limits = (floor(measurement, value),) if required else ()
        profile = Profile("H200", ("NVIDIA H200",), {}, limits, Path("h200.toml"))
        finding = judge(measurement, profile, self.topology, check, rehearsal=False, required=required)
        self.findings.append(finding)
        if finding.state == "missed":
            found = []
            if metric in ("pair_bandwidth", "busbw"):
                what = "every pair with it reaches 212 GB/s, all others 394"
                found = [Fault("links_slow", (gpu(5),), what, check=check)]
            self.faults += found
            self.failed[check] = str(LimitMissed([finding], self.topology, found))

    def _samples(self, metric, place, value):
        factor = self.bad.get(metric, 1.0) if place == WORLD or gpu(5) in place.parts else 1.0
        place_noise = 1 + 0.008 * (self._noise.random() - 0.5)
        return tuple(value * factor * place_noise * (1 + 0.002 * (self._noise.random() - 0.5)) for _ in range(3))


def floor(measurement, value):
    metric, unit, conditions = measurement.metric, measurement.unit, measurement.conditions
    if measurement.definition.better == "lower":
        top = round(value / 0.9, 3)
        return Limit(metric, "max", top, unit, "project", "our own judgement", conditions, "h200.toml")
    return Limit(metric, "min", round(0.9 * value, 3), unit, "published", SOURCE, conditions, "h200.toml", value)


def measured(topology, bad):
    run = Run(topology, bad)
    for precision, value in GEMM.items():
        check = f"test_4_each_gpu.py::test_matrix_product_is_fast[{precision}]"
        run.add(EACH, check, "gemm", value, precision in ("fp16", "bf16"), precision=precision, at_once="all")
    run.add(EACH, "test_4_each_gpu.py::test_gpus_are_equally_fast", "gemm", 762, precision="fp16", at_once="one")
    for operation, value in (("copy", 4248), ("triad", 4310)):
        check = "test_4_each_gpu.py::test_memory_bandwidth"
        run.add(EACH, check, "memory_bandwidth", value, operation=operation, at_once="all")
    for direction, value in (("read", 394.0), ("write", 396.4), ("write both ways", 391.8)):
        check = "test_5_links.py::test_pair_bandwidth[read]"
        run.add(PAIRS, check, "pair_bandwidth", value, direction=direction, link="NVLink")
    ring = {"dtype": "float32", "ranks": 8, "nvls": False}
    for collective, curve in BUSBW.items():
        for nbytes, value in zip(SIZES, curve, strict=True):
            check = f"test_6_collectives.py::test_bus_bandwidth[{collective}-{nbytes // MiB}MiB]"
            run.add(ALL, check, "busbw", value, nbytes in JUDGED, collective=collective, bytes=nbytes, **ring)
        for nbytes in (8, KiB, 32 * KiB):
            check = f"test_6_collectives.py::test_latency[{collective}-{nbytes}]"
            run.add(ALL, check, "collective_latency", 31 + nbytes / 4096, collective=collective, bytes=nbytes, **ring)
    image = {"model": "resnet50", "image": 224}
    for recipe, (one, efficiency) in TRAINING.items():
        check = f"test_8_resnet50.py::test_throughput_and_scaling[{recipe}]"
        run.add(EACH, check, "solo_train_throughput", one, recipe=recipe, ranks=1, batch=256, **image)
        for ranks in (2, 4, 8):
            share = 1 - (1 - efficiency) * (ranks - 1) / 7
            run.add(ALL, check, "train_throughput", one * ranks * share, recipe=recipe, ranks=ranks, batch=256, **image)
        scaled = {"recipe": recipe, "ranks": 8, "batch": 256, "method": EACH_ALONE, **image}
        run.add(ALL, check, "scaling_efficiency", efficiency, **scaled)
    check = "test_8_resnet50.py::test_each_gpu_alone"
    run.add(EACH, check, "solo_train_throughput", 6380, recipe="amp", ranks=1, **image)
    return run


def checks(run, failed):
    ids = dict.fromkeys((*(finding.check for finding in run.findings), *failed))
    for name in SUITE.required("standard"):
        ids |= dict.fromkeys(f"acceptance/{case}" for case in SUITE.cases(name))
    found = []
    for check in sorted(ids, key=lambda check: check.partition("::")[0]):
        known = shipped().checks.get(levels.check_name(check))
        title = known.title if known else check.partition("::")[2].removeprefix("test_").replace("_", " ")
        message, failed_by = {**run.failed, **failed}.get(check, ""), "limits" if check in run.failed else "other"
        if message:
            found.append(Check(check, "failed", 1.4, title, "", message, failed_by=failed_by))
        else:
            found.append(Check(check, "passed", 1.4, title))
    return found


def telemetry(seconds):
    return [Sample(START + second, (dict.fromkeys(TELEMETRY, 30 + second % 5),) * 8) for second in range(seconds)]


def bad_gpu(topology):
    """A run in which GPU 5 is slow and has lost NVLinks, and the messages of the checks that say so."""
    check = "acceptance/test_1_inventory.py::test_nvlinks_are_up"
    link = Fault("nvlink_down", (gpu(5),), "nvlinks_active is 9, should be 18", check=check)
    run = measured(topology, {"gemm": 0.87, "pair_bandwidth": 0.54, "busbw": 0.61, "solo_train_throughput": 0.86})
    run.faults.append(link)
    return run, {check: link.described(lambda _: topology.gpus[5].identity)}
