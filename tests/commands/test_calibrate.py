"""`gpufleet calibrate`: profiles that are made of runs, and runs of which none is made."""

import math
import re
from dataclasses import replace

import pytest

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Reference
from pytest_gpufleet.model.metric import Measurement, Metric
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.verdict import profile, toml_table
from tests import runs


@pytest.fixture
def calibrated(gpufleet, tmp_path):

    def calibrate(*arguments):
        (path := tmp_path / "my.toml").unlink(missing_ok=True)
        assert gpufleet("calibrate", *arguments, "-o", path)[0] == 0
        return profile.load(path)

    return calibrate


def test_a_calibrated_profile_is_met_by_the_runs_it_comes_from(tmp_path, gpufleet):
    second = {"busbw world": 352.3, "collective_latency world": 32.9, "solo_train_throughput gpu3": 6100.0}
    folders = [
        runs.record(tmp_path / "a"),
        runs.record(tmp_path / 'b"\\', "node8", second, utc="2026-11-22T08:00:00+00:00"),
    ]
    path = tmp_path / "my.toml"
    status, text = gpufleet("calibrate", *folders, "-o", path)
    known_good = toml_table.read(path).values["calibrated_on"]
    assert [(each["run"], each["uuids"][0]) for each in known_good] == [("a", "GPU-node7-0"), ('b"\\', "GPU-node8-0")]
    assert (status, "3 limits for NVIDIA X9000" in text) == (0, True)
    written = {limit.metric: limit for limit in profile.load(path).limits}
    # A latency has no default spread: a floor, by its tolerance. The others are what the machines reach.
    assert {metric: limit.reference and limit.reference.value for metric, limit in written.items()} == {
        "busbw": 356.2, "collective_latency": None, "solo_train_throughput": 6188.0,
    }  # fmt: skip
    assert written["collective_latency"].met_by(32.9)
    # Limits of machines with an NVSwitch must not reject boards whose GPUs are linked directly.
    assert [limit.conditions.get("fabric") for limit in written.values()] == ["nvswitch", "nvswitch", None]
    busbw = written["busbw"]
    assert (busbw.grade, busbw.reference) == (
        "calibrated", Reference(356.2, 2, "2026-11-22", "2.28.9", "580.159.04"),
    )  # fmt: skip
    spreads = {row.metric: (row.within, row.between, row.machines, row.gpus) for row in profile.load(path).spreads}
    assert spreads == {
        "busbw": (None, 0.01529, 2, 2),
        "solo_train_throughput": (0.005714, 0.002857, 2, 8),  # one of eight GPUs is 1.6 % slower
    }
    assert busbw.source == (
        "4x NVIDIA X9000, node7, node8, 2026-11-21 to 2026-11-22, driver 580.159.04, NCCL 2.28.9, torch 2.11.0+cu130"
    )
    third = runs.record(tmp_path / "c", "node9", second)  # another machine that does as well
    page = tmp_path / "again.html"
    assert gpufleet("judge", third, "--fleet-profile", path, "-o", page)[0] == 0
    assert "node8-S0, node8-S1" in page.read_text()
    first = path.read_text()
    path.unlink()
    gpufleet("calibrate", *folders, "-o", path)
    assert path.read_text() == first


def test_what_limits_find_is_said_and_more_machines_find_more(tmp_path, gpufleet):
    folders = [runs.record(tmp_path / f"{n}", f"node{n}") for n in range(8)]
    found = []
    for machines in (2, 3, 8):
        status, text = gpufleet("calibrate", *folders[:machines], "-o", path := tmp_path / f"{machines}.toml")
        line = text.partition("training throughput")[2]
        sizes = [float(size) for size in re.findall(r"([0-9.]+)%", line)]
        assert (status, len(sizes), "of healthy machines meet" in line) == (0, 5, True)
        assert ("mostly default spread" in text) == (machines < 3)
        slow = {f"solo_train_throughput {gpu}": 6200 * (1 - size / 100) for size in (sizes[3],) for gpu in runs.GPUS}
        slow_one = runs.record(tmp_path / f"slow{machines}", "other", slow)
        assert gpufleet("judge", slow_one, "--fleet-profile", path)[0] == 1
        found.append(sizes[3])
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]


def test_a_machine_that_calibrated_itself_is_not_accepted(tmp_path, gpufleet):
    folder, path, page = runs.record(tmp_path / "a"), tmp_path / "my.toml", tmp_path / "again.html"
    status, text = gpufleet("calibrate", folder, "-o", path)
    assert (status, "of 1 machine: mostly default spread" in text) == (0, True)
    status, text = gpufleet("judge", folder, "--fleet-profile", path, "-o", page)
    assert (status, text.split()[0]) == (10, "INCOMPLETE")
    said = "come from this very machine: my.toml was calibrated on GPU 0 (serial node7-S0), GPU 1 (serial node7-S1)"
    assert said in text
    assert said in page.read_text().partition('id="fleet-gpus"')[0]
    status, text = gpufleet("calibrate", folder, "-o", path)
    assert (status, "my.toml is there already and is left as it is" in text) == (1, True)
    others = [runs.record(tmp_path / host, host, utc="2026-11-22T08:00:00+00:00") for host in ("node8", "node9")]
    _, text = gpufleet("calibrate", folder, *others, "-o", tmp_path / "all.toml")
    assert "mostly default spread" not in text
    fresh = runs.record(tmp_path / "fresh", "node10")
    assert gpufleet("judge", fresh, "--fleet-profile", tmp_path / "all.toml")[0] == 0
    assert gpufleet("judge", others[1], "--fleet-profile", tmp_path / "all.toml")[0] == 10


def test_shipped_limits_stay_what_they_are_unless_replacing_them_is_asked_for(tmp_path, calibrated, monkeypatch):
    shipped = profile.for_gpu(runs.H200)
    *others, (check, alone, required) = runs.FIGURES
    alone = replace(alone, conditions={**alone.conditions, "batch": 1024})
    monkeypatch.setattr(runs, "FIGURES", (*others, (check, alone, required)))
    limit = shipped.limit_for(alone).value

    def limits_of(folder, *options):
        written = calibrated(folder, *options)
        assert (written.match, written.base) == ((runs.H200,), shipped)
        assert {row.metric for row in written.spreads} <= {limit.metric for limit in written.limits}
        return [limit.metric for limit in written.limits]

    def fast(by):
        good = {"busbw world": 9000.0, **{f"solo_train_throughput {gpu}": limit * by for gpu in runs.GPUS}}
        return runs.record(tmp_path / f"{by}", values=good, machine=runs.topology("node7", runs.H200))

    fastest, same = fast(1.2), fast(1.0)
    assert limits_of(fastest) == ["collective_latency"]
    assert limits_of(fastest, "--replace-shipped") == ["busbw", "collective_latency", "solo_train_throughput"]
    # The line of one machine is below that of the seven that are shipped.
    assert limits_of(same, "--replace-shipped") == ["busbw", "collective_latency"]


def test_a_figure_that_had_a_limit_gets_one_though_it_requires_none(tmp_path, calibrated):
    small = runs.limit("busbw", "min", 10.0, "GB/s", 'bytes = "1 MiB"')
    limits = runs.written(tmp_path / "contract.toml", runs.contract() + small)
    written = calibrated(runs.record(tmp_path / "run", limits=limits))
    assert [limit.value for limit in written.limits if limit.metric == "busbw"] == [21.0, 360.0]


def test_what_could_not_be_measured_gets_no_limit(tmp_path, calibrated, monkeypatch):
    check, measurement, _ = runs.FIGURES[0]
    nothing = (check, replace(measurement, metric="gemm", values={}, conditions={"precision": "fp16"}), True)
    monkeypatch.setattr(runs, "FIGURES", [*runs.FIGURES, nothing])
    written = calibrated(runs.record(tmp_path / "run"))
    assert {limit.metric for limit in written.limits} == {"busbw", "collective_latency", "solo_train_throughput"}


def test_the_margin_of_a_ratio_that_is_next_to_nothing_is_more_than_nothing(tmp_path, calibrated, monkeypatch):
    share = Measurement("communication_share", {"world": 0.004}, {"model": "resnet50", "recipe": "bf16", "ranks": 4})
    monkeypatch.setattr(runs, "FIGURES", (*runs.FIGURES, (runs.ALONE, share, True)))
    folder = runs.record(tmp_path / "run")
    assert calibrated(folder).limit_for(share).value == 0.1  # which is asked of every GPU
    assert 0.03 < calibrated(folder, "--replace-shipped").limit_for(share).value < 0.1


def machines_with(tmp_path, monkeypatch, *gpus):
    """Runs of as many machines, whose GPUs have these figures of an author's own, which knows no peers."""
    own = Metric("decode_rate", "tokens/s", "higher", "decode rate")
    figure = Measurement(own.name, dict.fromkeys(runs.GPUS, 100.0), {}, definition=own)
    monkeypatch.setattr(runs, "FIGURES", ((runs.ALONE, figure, True),))
    return [
        runs.record(
            tmp_path / str(index), f"node{index}",
            {f"decode_rate {gpu}": value for gpu, value in zip(runs.GPUS, each, strict=True)},
        )
        for index, each in enumerate(gpus)
    ]  # fmt: skip


def test_no_limit_is_above_what_a_known_good_gpu_did(tmp_path, calibrated, monkeypatch):
    (limit,) = calibrated(*machines_with(tmp_path, monkeypatch, *([(100.0, 98.0, 94.0, 88.0)] * 4))).limits
    assert (limit.value < 88.0, limit.measured) == (True, 95.0)


def test_a_gpu_that_is_not_like_the_others_is_not_known_to_be_good(tmp_path, gpufleet, monkeypatch):
    folders = machines_with(tmp_path, monkeypatch, *([(100.0, 100.5, 99.5, 100.0)] * 7), (100.0, 100.0, 93.0, 100.0))
    status, text = gpufleet("calibrate", *folders, "-o", tmp_path / "my.toml")
    assert status == 1
    assert "decode rate has a GPU too far from the others of its machine to be one of them" in text


@pytest.mark.parametrize(("second", "said"), [
    ({"values": {"busbw world": 310.0}}, "differs by 15%: 360 GB/s in a, 310 GB/s in b"),
    ({"values": {"busbw world": math.nan}}, f"b was rejected: {runs.BANDWIDTH}[0], {runs.BANDWIDTH}[1]"),
    ({"values": {"solo_train_throughput gpu1": 5700.0}}, f"b was rejected: {runs.ALONE}"),
    ({"failed": {runs.ALONE: "other"}}, f"b was rejected: {runs.ALONE}"),
    ({"faults": (Fault("hardware_slowdown", (gpu(1),), "0.3 s"),)}, "b was rejected: GPU 1 NVIDIA X9000, serial node8"),
    ({"ends": False}, "b did not come to its end"),
    ({"host": "node7"}, "a and b are one and the same run"),
    ({"without": "test_2_health.py"}, "b did not show that its machine is sound: nothing of test_2_health.py ran"),
    ({"machine": runs.topology("node8", driver="575.57.08")}, "driver: 580.159.04 (a), 575.57.08 (b)"),
    ({"machine": runs.topology("node8", "NVIDIA B300")}, "GPU model: NVIDIA X9000 (a), NVIDIA B300 (b)"),
])  # fmt: skip
def test_no_profile_is_made_of_doubtful_runs(tmp_path, gpufleet, second, said):
    folders = [runs.record(tmp_path / "a"), runs.record(tmp_path / "b", **{"host": "node8", **second})]
    status, text = gpufleet("calibrate", *folders, "-o", tmp_path / "my.toml")
    assert status == 1
    assert said in text
    assert not (tmp_path / "my.toml").exists()
