"""What Prometheus reads of a run: figures with their limits, faults, nodes; and where the textfile may be."""

import math
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.report import exports
from pytest_gpufleet.run import lifetime
from pytest_gpufleet.verdict.judgement import read
from tests import runs
from tests.conftest import EVIDENCE


def exported(record, folder):
    (folder / "textfiles").mkdir()
    exports.write_textfile(file := folder / "textfiles" / "x.prom", record)
    assert [path.name for path in file.parent.iterdir()] == ["x.prom"]  # nothing half-written beside it
    assert file.stat().st_mode & 0o044  # node_exporter is another user
    families = text_string_to_metric_families(file.read_text())
    return {family.name: [(dict(each.labels), each.value) for each in family.samples] for family in families}


def test_figures_and_limits_of_gpus(tmp_path):
    limits, host = runs.written(tmp_path / "c.toml"), 'a "strange"\\host'
    folder = runs.record(tmp_path / "run", host=host, limits=limits, values={"busbw world": math.nan})
    record = read(folder / "evidence.jsonl")
    found = exported(record, tmp_path)
    assert not [name for name, series in found.items() if "node" in name or any("node" in each for each, _ in series)]
    verdicts = {labels["verdict"]: (value, labels["host"]) for labels, value in found["gpufleet_verdict"]}
    names = ("ACCEPTED", "REJECTED", "INCOMPLETE", "REHEARSAL")
    assert verdicts == {name: (name == "REJECTED", host) for name in names}
    assert {labels["outcome"]: value for labels, value in found["gpufleet_checks"]} == {
        "passed": len(record.checks) - 2, "failed": 2, "skipped": 0, "not applicable": 0,
    }  # fmt: skip
    assert {labels.get("condition_collective") for labels, _ in found["gpufleet_figure"]} == {"all_reduce", ""}
    solo = [labels for labels, _ in found["gpufleet_figure"] if labels["metric"] == "solo_train_throughput"]
    assert [labels["serial"] for labels in solo] == [f'a "strange"\\host-S{index}' for index in range(4)]
    assert any(math.isnan(value) for _, value in found["gpufleet_figure"])
    assert {(labels["metric"], labels["sense"]): value for labels, value in found["gpufleet_limit"]} == {
        (metric, sense): value for metric, (sense, value, *_) in runs.CONTRACT.items()
    }


def test_faults_by_code_and_place(tmp_path):
    record = read(EVIDENCE / "h200x4-neighbour" / "evidence.jsonl")
    record.run = msgspec.structs.replace(record.run, host="node\udcff")  # no UTF-8, as names of files give it
    told = exported(record, tmp_path)
    found = [labels for labels, value in told["gpufleet_fault"] if value == 1]
    serials = [gpu.serial for gpu in record.topology.gpus]
    neighbours = [labels for labels in found if labels["name"] == "foreign_process"]
    assert neighbours == [
        {"code": "106", "name": "foreign_process", "action": "CONFIG", "place": f"gpu{index}", "serial": serials[index]}
        for index in (0, 2)
    ]
    assert {labels["code"] for labels in found} == {"106", "401", "402"}
    assert {labels["host"] for labels, _ in told["gpufleet_verdict"]} == {"node"}


def test_the_node_of_each_verdict_figure_and_fault(faulty, tmp_path):
    told = exported(faulty, tmp_path)
    verdicts = {labels["node"]: labels["verdict"] for labels, value in told["gpufleet_node_verdict"] if value}
    assert verdicts["node-004"] == "REJECTED"
    assert verdicts["node-001"] == "ACCEPTED"
    assert "node-007" not in verdicts
    assert [labels["node"] for labels, value in told["gpufleet_node_lost"] if value] == ["node-007"]
    rails = {(labels["node"], labels["place"]) for labels, _ in told["gpufleet_figure"] if "rail" in labels["place"]}
    assert ("node-005", "node4/rail1") in rails
    faults = {(labels["name"], labels["node"]) for labels, _ in told["gpufleet_fault"]}
    assert {("node_slow", "node-003"), ("rail_slow", "node-005")} <= faults


@pytest.mark.parametrize(("path", "why"), [
    ("no/such/folder/x.prom", "No such file or directory"),
    (".", "it is a folder"),
    ("/proc/x.prom", ""),
    (f"{'x' * 300}/x.prom", "File name too long"),
    ("/dev/null", "it is there and is no textfile of an earlier run"),
    ("bash.rc", "it is there and is no textfile of an earlier run; give another name, or remove it"),
    ("link.prom", "it is there"),
])  # fmt: skip
def test_a_textfile_that_cannot_be_written_is_refused(tmp_path, monkeypatch, path, why):
    monkeypatch.chdir(tmp_path)
    Path("bash.rc").write_text("secret")
    Path("x.prom").touch()
    Path("link.prom").symlink_to("x.prom")
    with pytest.raises(Refused, match=f"--fleet-prometheus {re.escape(path)} cannot be written: {why}"):
        lifetime.check_textfile(Path(path))
    lifetime.check_textfile(Path("x.prom"))  # made before, to give it to the right user
