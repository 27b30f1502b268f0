"""Recipes can be read by what they are for and use options that there are; dashboard and alerts ask for what a run
writes, and Prometheus and Grafana can read them."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpufleet.report import exports
from pytest_gpufleet.run.settings import OPTIONS
from tests.conftest import ROOT

RECIPES = ROOT / "docs" / "recipes"
FILES = sorted(path for path in RECIPES.rglob("*") if path.is_file())
PROGRAM = "/opt/gpufleet/bin/gpufleet"


def of_kind(*endings):
    return [path for path in FILES if path.name.endswith(endings)]


def by(program, *arguments):
    """What a program of the system says against its arguments; a skip where it is not installed."""
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{program} is not installed")
    ended = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return "" if ended.returncode == 0 else f"{ended.stdout}{ended.stderr}"


# By the ending of a file.
CHECKED = {
    "bash -n": ".sh", "shellcheck": ".sh", "kubernetes-validate --strict": ".yaml", "hadolint": "Dockerfile",
}  # fmt: skip


@pytest.mark.parametrize(("program", "path"), [(each, path) for each in CHECKED for path in of_kind(CHECKED[each])])
def test_programs_that_check_such_files_find_nothing(program, path):
    assert by(*program.split(), path) == ""


def test_scripts_can_be_run():
    assert all(os.access(path, os.X_OK) for path in of_kind(".sh"))


@pytest.mark.parametrize("path", of_kind(".yaml"), ids=lambda path: path.name)
def test_manifests_are_yaml(path):
    yaml = pytest.importorskip("yaml", reason="comes with Ray")
    *before, document = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    kind = "CronJob" if path.name == "cronjob.yaml" else "Job"
    assert (document["apiVersion"], document["kind"]) == ("batch/v1", kind)
    job = document["spec"].get("jobTemplate", document)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"].items() >= {"privileged": True, "runAsUser": 0}.items()  # and the kernel log
    if path.name == "nodes.yaml":
        (service,) = before
        head = f"{document['metadata']['name']}-0.{service['metadata']['name']}"
        assert pod["subdomain"] == service["metadata"]["name"]
        assert [each.partition(":")[0] for each in container["args"] if "head" in each] == [f"--fleet-head={head}"]
        assert (pod["dnsPolicy"], job["backoffLimit"]) == ("ClusterFirstWithHostNet", 0)
        assert f"--nodes={job['completions']}" in container["args"]
        assert job["completions"] == job["parallelism"]


@pytest.mark.parametrize("page", ["running.md", "recipes/README.md"])
def test_containers_have_all_that_a_verdict_takes(page):
    (command,) = re.findall(r"docker run (?:.*\\\n)*.*", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    for option in ("--ipc=host", "--ulimit memlock=-1", "--ulimit nofile=", "--privileged -v /dev:/dev -v /sys:/sys"):
        assert option in command


def test_units_are_those_of_systemd(tmp_path):
    for unit in of_kind(".service", ".timer"):  # with a program that is here
        (tmp_path / unit.name).write_text(unit.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true"))
    assert by("systemd-analyze", "verify", *sorted(tmp_path.iterdir())) == ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_options_in_recipes_are_there(path):
    known = {option.flag for option in OPTIONS.values()}
    assert {*re.findall(r"--fleet-[a-z-]+", path.read_text(encoding="utf-8"))} <= known


@pytest.mark.parametrize(("status", "gpus", "logged"), [
    (0, 8, ""),
    (1, 8, ""),
    (10, 8, "INCOMPLETE"),
    (143, 8, "exit status 143"),
    (1, 8, "without a verdict"),  # the package cannot be imported
    (4, 8, "exit status 4"),  # another run has the GPUs
    (1, 4, ""),  # the job has a part of them: nothing is run
    (1, 0, ""),  # no job: HealthCheckProgram
    (1, 8, "not checked"),  # the folder cannot be made
])  # fmt: skip
def test_the_prolog_drains_what_is_rejected_alone_and_logs_the_rest(tmp_path, status, gpus, logged):
    reports = tmp_path / "reports"
    if logged == "not checked":
        reports.write_text("in its place")
    drains, runs = status == 1 and gpus != 4 and not logged, gpus != 4 and logged != "not checked"
    log = tmp_path / "logged"
    does = {"scontrol": f'echo "$@" >{tmp_path}/drained', "logger": f'echo "$@" >{log}'}
    bin_ = programs(tmp_path / "bin", {**does, "gpufleet": f'echo "$@" {"REJECTED" * drains}; exit {status}'})
    script = (RECIPES / "slurm" / "prolog.sh").read_text(encoding="utf-8").replace(PROGRAM, str(bin_ / "gpufleet"))
    script = script.replace("/var/log/gpufleet", str(reports)).replace("export PATH=", f"export PATH={bin_}:")
    job_gpus = ",".join(map(str, range(gpus)))
    slurm = {"SLURM_JOB_GPUS": job_gpus, "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"} if gpus else {}
    slurm["SLURMD_NODENAME"] = "node7"
    ended = subprocess.run(["/bin/bash", "-c", script], env=slurm, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (int(drains), "")
    asked = [path.read_text() for path in tmp_path.glob("drained")]
    assert asked == [f"update NodeName=node7 State=DRAIN Reason=gpufleet: REJECTED, see {reports}\n"] * drains
    assert logged in (said := log.read_text() if log.exists() else "")
    assert bool(said) == bool(logged)
    assert len([*reports.glob("last-*.log")]) == runs


# What srun does with a command: as tests/nodes/rehearsals.py, on two addresses of this machine.
SRUN = f"""#!{sys.executable}
import json, os, subprocess, sys

words = sys.argv[1:]
at = next(at for at, word in enumerate(words) if not word.startswith("-"))
with open(os.environ["ASKED"], "w") as file:
    json.dump(words[:at], file)
step = {{"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}}
tasks = [
    subprocess.Popen(
        words[at:],
        env={{**os.environ, **step, "SLURM_PROCID": str(number), "SLURMD_NODENAME": f"127.0.0.{{number + 1}}"}},
    )
    for number in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""
OF_A_NODE = {"--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--mem=0"}


def programs(folder, does):
    folder.mkdir()
    for name, text in does.items():
        (folder / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def slurm_job(tmp_path, script, does, **more):
    """How a batch script ends, and what it asked srun for, beside programs in the place of Slurm's."""
    bin_ = programs(tmp_path / "bin", {"srun": SRUN, **does})
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path), "HOME": str(tmp_path)}
    mine = {"PATH": f"{bin_}:{os.environ['PATH']}", "GPUFLEET": str(bin_ / "gpufleet"), **more}
    env, command = {**job, **mine, "ASKED": str(tmp_path / "asked")}, [RECIPES / "slurm" / script]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    return ended, set(json.loads((tmp_path / "asked").read_text()))


def test_the_handover_is_one_run_on_all_nodes_of_a_job(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_of_one_machine(): pass\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rehearse = f"{sys.executable} -m pytest test_one.py --rehearse=1 --fleet-head 127.0.0.1:{port}"
    ended, asked = slurm_job(tmp_path, "handover.sh", {"gpufleet": f'shift; exec {rehearse} "${{@/--gpus/--maxfail}}"'})
    assert (ended.returncode, asked) == (0, OF_A_NODE), ended.stdout + ended.stderr
    (summary,) = (tmp_path / "reports").glob("*/summary.json")
    document = json.loads(summary.read_text())
    assert (document["verdict"], document["run"]["transport"]) == ("REHEARSAL", "srun")
    assert [node["host"] for node in document["nodes"]] == ["127.0.0.1", "127.0.0.2"]


def test_with_an_image_each_task_is_in_it(tmp_path):
    """And an exit status of the head is that of the job."""
    ten = {"gpufleet": '[ "$SLURM_PROCID" = 1 ] || exit 10'}
    ended, asked = slurm_job(tmp_path, "handover.sh", ten, CONTAINER="r#i:1")
    reports = tmp_path / "reports"
    assert ended.returncode == 10
    assert asked > OF_A_NODE | {"--container-image=r#i:1", "--no-container-mount-home"}
    assert f"--container-mounts={reports}:{reports},/dev:/dev,/sys:/sys" in asked


def test_nodes_alone_need_no_folder_that_all_see(tmp_path):
    gpufleet = """
if [ "$1" = fleet ]; then echo "$@" >"$ASKED.fleet"; exit 10; fi
while [ "$1" != --fleet-dir ]; do shift; done
mkdir -p "$2.$SLURMD_NODENAME/run"
exit 1
"""
    gather = 'for node in 127.0.0.1 127.0.0.2; do cp -r "$2.$node" "$3.$node"; done'
    local = str(tmp_path / "local")
    ended, asked = slurm_job(tmp_path, "alone.sh", {"gpufleet": gpufleet, "sgather": gather}, LOCAL=local)
    assert (ended.returncode, asked, ended.stderr) == (10, OF_A_NODE, "")
    merged = (tmp_path / "asked.fleet").read_text().split()
    reports = tmp_path / "reports" / "7"
    assert merged[1:3] == [f"{reports}/of.127.0.0.{number}/run" for number in (1, 2)]


MONITORING = ROOT / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
ALERTS = (MONITORING / "alerts.yml").read_text(encoding="utf-8")


def metrics(text):
    return set(re.findall(r"\bgpufleet_\w+", text))


def test_the_dashboard_has_the_form_that_grafana_reads():
    """By the types of @grafana/schema 13.2.3 (dist/types/raw/dashboard); Grafana publishes no JSON Schema of them."""
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels"} <= DASHBOARD.keys()
    panels = DASHBOARD["panels"]
    for panel in panels:
        assert {"id", "title", "gridPos", "targets"} <= panel.keys()
        assert panel["type"] in ("table", "stat", "bargauge", "timeseries")
        assert panel["datasource"].keys() == {"type", "uid"}
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert all({"refId", "expr"} <= target.keys() for target in panel["targets"])
    assert len({panel["id"] for panel in panels}) == len(panels)
    grids = [panel["gridPos"] for panel in panels]
    cells = {(grid["x"] + x, grid["y"] + y) for grid in grids for x in range(grid["w"]) for y in range(grid["h"])}
    assert len(cells) == sum(grid["w"] * grid["h"] for grid in grids)  # none covers another
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables


def test_dashboard_and_alerts_ask_for_what_a_run_writes():
    asked = metrics(json.dumps([panel["targets"] for panel in DASHBOARD["panels"]] + DASHBOARD["templating"]["list"]))
    written = {*exports.HELP}
    assert asked == written
    assert {"gpufleet_running", "gpufleet_run_timestamp_seconds", "gpufleet_verdict"} <= metrics(ALERTS) <= written
    tried = (MONITORING / "alerts.test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"- alert: (\w+)", ALERTS)) == set(re.findall(r"- alertname: (\w+)", tried))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_when_they_have_to():
    command = ["promtool", "test", "rules", "alerts.test.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
