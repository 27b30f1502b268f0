"""`gpufleet export`: what of recorded runs arrives in each format, read back with the format's own reader."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.commands import export
from pytest_gpufleet.report.exports.tracked import Tracked, tracked
from pytest_gpufleet.run.folder import RunFolder
from tests.conftest import ROOT

RUN = ROOT / "tests/recorded/h200x4-b"


@pytest.fixture(scope="module")
def content() -> Tracked:
    folder = RunFolder(RUN)
    return tracked(folder.record(), folder.digest())


def points(content: Tracked) -> list[tuple[str, int, float]]:
    return [(each.tag, point.step, point.value) for each in content.series for point in each.points]


def test_figures_curves_and_telemetry_are_those_of_the_record(content: Tracked) -> None:
    record = RunFolder(RUN).record()
    by_tag = {each.tag: each for each in content.series}
    assert len(by_tag) == len(content.series)
    finding = next(each for each in record.findings if each.measurement.metric == "gemm_mean")
    place, value = next(iter(finding.measurement.values.items()))
    told = [
        each.points[0].value
        for each in content.series
        if (each.kind, each.name, each.place) == ("figures", "gemm_mean", str(place))
    ]
    assert value in told
    curve = next(each for each in content.series if each.name == "collective_latency by bytes")
    assert [point.step for point in curve.points] == sorted(point.step for point in curve.points)
    assert "bytes" not in curve.conditions
    power = by_tag["telemetry/power_watts/gpu0"]
    assert [point.value for point in power.points] == [each["gpus"][0]["power_watts"] for each in record.telemetry]
    assert (power.unit, power.points[0].step) == ("W", 0)
    assert content.about["evidence_sha256"] == RunFolder(RUN).digest()


def test_csv(content: Tracked, tmp_path: Path) -> None:
    assert cli.main(["export", str(RUN), "--to", "csv", "-o", str(tmp_path / "out")]) == 0
    rows = []
    for kind in ("figures", "curves", "telemetry"):
        with (tmp_path / "out" / f"{kind}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                tag = "/".join(filter(None, (kind, row["name"], row["conditions"], row["place"])))
                rows.append((tag, int(row["step"]), float(row["value"])))
    assert rows == points(content)


def test_tensorboard(content: Tracked, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    assert cli.main(["export", str(RUN), "--to", "tensorboard", "-o", str(tmp_path / "out")]) == 0
    events = EventAccumulator(str(tmp_path / "out"), size_guidance={TENSORS: 0})
    events.Reload()
    read = {
        (tag, event.step, float(make_ndarray(event.tensor_proto))): event.wall_time
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
    }
    assert len(read) == len(points(content))
    for (tag, step, value), (found_tag, found_step, found) in zip(sorted(points(content)), sorted(read), strict=True):
        assert (tag, step) == (found_tag, found_step)
        assert math.isclose(value, found, rel_tol=1e-6)  # float32
    sample = next(each for each in content.series if each.kind == "telemetry").points[0]
    assert sample.time in read.values()


def test_swanlab(content: Tracked, tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    assert cli.main(["export", str(RUN), "--to", "swanlab", "-o", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").rglob("*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(each) for each in reader]
    scalars = [each.scalar for each in records if each.WhichOneof(Record.DESCRIPTOR.oneofs[0].name) == "scalar"]
    assert sorted((each.key, each.step, each.value.number) for each in scalars) == sorted(points(content))
    assert content.about["evidence_sha256"] in next((tmp_path / "out").rglob("config.yaml")).read_text()


def test_what_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("dear to me")
    for output in (tmp_path, tmp_path / "mine"):
        assert cli.main(["export", str(RUN), "--to", "csv", "-o", str(output)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert "is not empty and is left as it is" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "dear to me"


def test_a_missing_extra_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert cli.main(["export", str(RUN), "--to", "swanlab", "-o", str(tmp_path / "out")]) == 1
    assert "pip install 'pytest-gpufleet[swanlab]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
