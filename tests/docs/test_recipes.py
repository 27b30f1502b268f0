"""Recipes can be read by what they are for and use options that there are; dashboard and alerts ask for what a run
writes, and Prometheus and Grafana can read them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import prometheus
from pytest_gpufleet.run.settings import OPTIONS
from tests.conftest import ROOT

RECIPES = ROOT / "docs" / "recipes"
PROLOG = RECIPES / "slurm" / "prolog.sh"
FILES = sorted(path for path in RECIPES.rglob("*") if path.is_file())
PROGRAM = "/opt/gpufleet/bin/gpufleet"


def of_kind(*endings: str) -> list[Path]:
    return [path for path in FILES if path.name.endswith(endings)]


def by(program: str, *arguments: object) -> str:
    """What a program of the system says against its arguments; a skip where it is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    ended = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return "" if ended.returncode == 0 else f"{ended.stdout}{ended.stderr}"


CHECKED = {  # by the ending of a file
    "bash -n": ".sh",
    "shellcheck": ".sh",
    "kubernetes-validate --strict": ".yaml",
    "hadolint": "Dockerfile",
}


@pytest.mark.parametrize(
    ("program", "path"), [(each, path) for each, kind in CHECKED.items() for path in of_kind(kind)]
)
def test_programs_that_check_such_files_find_nothing(program: str, path: Path) -> None:
    assert by(*program.split(), path) == ""


def test_scripts_can_be_run() -> None:
    assert all(os.access(path, os.X_OK) for path in of_kind(".sh"))


@pytest.mark.parametrize("path", of_kind(".yaml"), ids=lambda path: path.name)
def test_manifests_are_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="comes with Ray")
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (document["apiVersion"], document["kind"]) == ("batch/v1", "Job" if path.name == "job.yaml" else "CronJob")
    job = document["spec"].get("jobTemplate", document)["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["securityContext"] == {"privileged": True, "runAsUser": 0}  # no other has the kernel log


@pytest.mark.parametrize("page", ["running.md", "recipes/README.md"])
def test_containers_have_all_that_a_verdict_takes(page: str) -> None:
    (command,) = re.findall(r"docker run (?:.*\\\n)*.*", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    for option in ("--ipc=host", "--ulimit memlock=-1", "--ulimit nofile=", "--privileged -v /dev:/dev -v /sys:/sys"):
        assert option in command


def test_units_are_those_of_systemd(tmp_path: Path) -> None:
    for unit in of_kind(".service", ".timer"):  # with a program that is here
        (tmp_path / unit.name).write_text(unit.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true"))
    assert by("systemd-analyze", "verify", *sorted(tmp_path.iterdir())) == ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_options_in_recipes_are_there(path: Path) -> None:
    known = {option.flag for option in OPTIONS.values()}
    assert {*re.findall(r"--fleet-[a-z-]+", path.read_text(encoding="utf-8"))} <= known


@pytest.mark.parametrize(
    ("status", "gpus", "ends", "drained"),
    [
        (0, 8, 0, ""),
        (1, 8, 1, "REJECTED"),
        (10, 8, 1, "INCOMPLETE"),
        (143, 8, 1, "exit status 143"),
        (4, 8, 0, ""),  # another run has the GPUs
        (1, 4, 0, ""),  # the job has a part of them: nothing is run
    ],
)
def test_the_prolog_drains_what_is_not_accepted(
    tmp_path: Path, status: int, gpus: int, ends: int, drained: str
) -> None:
    bin_, reports = tmp_path / "bin", tmp_path / "reports"
    bin_.mkdir()
    does = {"gpufleet": f'echo "$@"; exit {status}', "scontrol": f'echo "$@" >{tmp_path}/drained', "logger": "true"}
    for name, line in does.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{line}\n")
        (bin_ / name).chmod(0o755)
    script = PROLOG.read_text(encoding="utf-8").replace(PROGRAM, str(bin_ / "gpufleet"))
    script = script.replace("/var/log/gpufleet", str(reports)).replace("export PATH=", f"export PATH={bin_}:")
    job_gpus = ",".join(map(str, range(gpus)))
    slurm = {"SLURM_JOB_GPUS": job_gpus, "SLURM_SCRIPT_CONTEXT": "prolog_slurmd", "SLURMD_NODENAME": "node7"}
    ended = subprocess.run(["/bin/bash", "-c", script], env=slurm, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (ends, "", "")
    asked = [path.read_text() for path in tmp_path.glob("drained")]
    assert asked == [f"update NodeName=node7 State=DRAIN Reason=gpufleet: {drained}, see {reports}\n"] * bool(drained)
    assert (reports / "last-prolog_slurmd.log").exists() == (gpus == 8)


MONITORING = ROOT / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
ALERTS = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
TEXT, NUMBER = ".+", r"\d+"
# The fields that Grafana reads of a dashboard with panels for Prometheus, after the types of @grafana/schema 13.2.3
# (dist/types/raw/dashboard): Grafana publishes no JSON Schema of them. By the way to each what it may be; behind a "?"
# it may be missing.
FIELDS = {
    "title": TEXT, "uid": "[a-zA-Z0-9_-]{1,40}", "schemaVersion": r"3[6-9]|[4-9]\d", "time from": TEXT, "time to": TEXT,
    "templating list name": TEXT, "templating list type": "query|datasource", "templating list query": TEXT,
    "templating list ?datasource type": "prometheus", "templating list ?datasource uid": TEXT,
    "panels id": NUMBER, "panels type": "table|stat|bargauge|timeseries", "panels title": TEXT,
    "panels datasource type": "prometheus", "panels datasource uid": TEXT,
    "panels gridPos h": NUMBER, "panels gridPos y": NUMBER,
    "panels gridPos w": r"1?\d|2[0-4]", "panels gridPos x": r"1?\d|2[0-3]",
    "panels targets refId": TEXT, "panels targets expr": TEXT,
    "panels targets ?datasource type": "prometheus", "panels targets ?datasource uid": TEXT,
    "panels fieldConfig overrides": r"\[.*\]", "panels fieldConfig defaults": r"\{.*\}",
    "panels fieldConfig defaults ?thresholds mode": TEXT,
    "panels fieldConfig defaults ?thresholds steps color": TEXT,
    "panels fieldConfig defaults ?thresholds steps value": TEXT,
}  # fmt: skip


def found(document: Any, way: list[str]) -> list[str]:
    """What stands at the end of a way, in each element of the lists on it; "" where it is missing."""
    if isinstance(document, list) and way:
        return [each for element in document for each in found(element, way)] if document else [""]
    if not way:
        return [str(document)]
    name, *rest = way
    if name.lstrip("?") not in document:
        return [] if name.startswith("?") else [""]
    return found(document[name.lstrip("?")], rest)


def written() -> set[str]:
    """The names of all metrics that a textfile can have."""
    record = Record()
    lines = (*prometheus._of_the_run(record), *prometheus._of_nodes(record), *prometheus._of_places(record))
    return {name for name, _, _ in lines}


def metrics(text: str) -> set[str]:
    return set(re.findall(r"\bgpufleet_\w+", text))


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    wrong = {way: each for way, may_be in FIELDS.items() for each in found(DASHBOARD, way.split())
             if not re.fullmatch(may_be, each, re.DOTALL)}  # fmt: skip
    assert wrong == {}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)  # none covers another
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables


def test_the_dashboard_asks_for_all_that_a_run_writes_and_for_nothing_else() -> None:
    asked = metrics(json.dumps([panel["targets"] for panel in DASHBOARD["panels"]] + DASHBOARD["templating"]["list"]))
    assert asked == written()


def test_alerts_ask_for_what_a_run_writes_and_each_is_tried() -> None:
    assert {"gpufleet_running", "gpufleet_run_timestamp_seconds", "gpufleet_verdict"} <= metrics(ALERTS) <= written()
    tried = (MONITORING / "alerts.test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"- alert: (\w+)", ALERTS)) == set(re.findall(r"- alertname: (\w+)", tried))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_when_they_have_to() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
