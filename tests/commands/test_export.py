"""`gpufleet export`: what of recorded runs arrives in each format, read back with the format's own reader."""

import csv
import json
import math

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.commands import runs as export
from pytest_gpufleet.report import exports
from pytest_gpufleet.run.folder import RunFolder
from tests.conftest import ROOT

# Of a version that recorded no losses: as a later one would have.
RESNET = {"model": "resnet50", "recipe": "amp", "ranks": 1}
LOSSES = [
    {"training": RESNET, "place": "gpu0", "steps": [1, 21, 41], "losses": [7.08, 6.5, 6.34]},
    {"training": RESNET, "place": "gpu1", "steps": [1, 21, 41], "losses": [7.09, 6.6, 6.35]},
    {"training": {**RESNET, "ranks": 2}, "place": "world", "steps": [1, 2], "losses": [7.0, 6.9]},
    {"training": RESNET, "place": "gpu0", "steps": [1, 21], "losses": [7.08, 6.4]},  # once more
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "node7"
    folder.mkdir()
    *lines, verdict = (ROOT / "tests/recorded/h200x4-b/evidence.jsonl").read_text().splitlines(keepends=True)
    event = {"t": "2026-11-20T23:30:00.000+00:00", "event": "losses", "check": "acceptance/test_8.py::test_trains[amp]"}
    lines += [json.dumps({**event, "curve": curve}) + "\n" for curve in LOSSES]
    (folder / "evidence.jsonl").write_text("".join([*lines, verdict]))
    return folder


@pytest.fixture(scope="module")
def points(run):
    return exports.points(RunFolder(run).record())


def triples(points):
    return [(point.tag, point.step, point.value) for point in points]


def test_points_are_those_of_the_record(run, points):
    record = RunFolder(run).record()
    finding = next(each for each in record.findings if each.measurement.metric == "gemm_mean")
    place, value = next(iter(finding.measurement.values.items()))
    assert ("figures", "gemm_mean", str(place), value) in {
        (point.kind, point.name, point.place, point.value) for point in points
    }
    latency = [point for point in points if point.name == "collective_latency by bytes"]
    steps = [point.step for point in latency if point.tag == latency[0].tag]
    assert steps == sorted(steps)
    assert "bytes" not in latency[0].conditions
    power = [point for point in points if point.tag == "telemetry/power_watts/gpu0"]
    assert [point.value for point in power] == [each.gpus[0]["power_watts"] for each in record.telemetry]
    assert (power[0].unit, power[0].step) == ("W", 0)
    alone, together = (f"losses/test_8.py::test_trains/model=resnet50, recipe=amp, ranks={count}" for count in (1, 2))
    assert triples([point for point in points if point.kind == "losses"]) == [
        (f"{alone}/gpu0", 1, 7.08), (f"{alone}/gpu0", 21, 6.4),
        (f"{alone}/gpu1", 1, 7.09), (f"{alone}/gpu1", 21, 6.6), (f"{alone}/gpu1", 41, 6.35),
        (f"{together}/world", 1, 7.0), (f"{together}/world", 2, 6.9),
    ]  # fmt: skip


def test_csv(run, points, tmp_path):
    assert cli.main(["export", str(run), "--to", "csv", "-o", str(tmp_path / "out")]) == 0
    rows = []
    for kind in ("figures", "curves", "losses", "telemetry"):
        with (tmp_path / "out" / f"{kind}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                tag = "/".join(filter(None, (kind, row["name"], row["conditions"], row["place"])))
                rows.append((tag, int(row["step"]), float(row["value"])))
    assert rows == triples(points)


def test_tensorboard(run, points, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    assert cli.main(["export", str(run), "--to", "tensorboard", "-o", str(tmp_path / "out")]) == 0
    events = EventAccumulator(str(tmp_path / "out"), size_guidance={TENSORS: 0})
    events.Reload()
    read = {
        (tag, event.step, float(make_ndarray(event.tensor_proto))): event.wall_time
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
    }
    assert len(read) == len(triples(points))
    for (tag, step, value), (found_tag, found_step, found) in zip(sorted(triples(points)), sorted(read), strict=True):
        assert (tag, step) == (found_tag, found_step)
        assert math.isclose(value, found, rel_tol=1e-6)  # float32
    assert {point.time for point in points if point.kind == "telemetry"} <= set(read.values())


def test_swanlab(run, points, tmp_path):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    assert cli.main(["export", str(run), "--to", "swanlab", "-o", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").rglob("*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(each) for each in reader]
    scalars = [each.scalar for each in records if each.WhichOneof(Record.DESCRIPTOR.oneofs[0].name) == "scalar"]
    assert sorted((each.key, each.step, each.value.number) for each in scalars) == sorted(triples(points))
    assert RunFolder(run).digest() in next((tmp_path / "out").rglob("config.yaml")).read_text()


def test_what_is_there_is_left_as_it_is_and_a_missing_extra_is_named_before_anything_is_written(
    run, tmp_path, gpufleet, monkeypatch
):
    (tmp_path / "mine").write_text("dear to me")
    for output, why in ((tmp_path, "is not empty and is left as it is"), (tmp_path / "mine", "cannot be written to")):
        status, text = gpufleet("export", run, "--to", "csv", "-o", output)
        assert (status, why in text) == (1, True)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["dear to me"]
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    status, text = gpufleet("export", run, "--to", "swanlab", "-o", tmp_path / "out")
    assert (status, "pip install 'pytest-gpufleet[swanlab]'" in text) == (1, True)
    assert not (tmp_path / "out").exists()
