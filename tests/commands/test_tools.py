"""What can be done with the evidence of a run on a machine without GPUs: verify, report, judge, compare, calibrate."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.model.events import Telemetry, Verdict
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import Evidence
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.judgement import read
from tests import runs
from tests.conftest import EVIDENCE, ROOT, SECONDS

RECORDED = sorted(path.parent for path in EVIDENCE.glob("*/evidence.jsonl"))
NEIGHBOUR = EVIDENCE / "h200x4-neighbour"
SCHEMA = json.loads(summary.schema())


@pytest.fixture(scope="module")
def rehearsed(fleet):
    """A real run on two CPU ranks, with everything that it leaves behind."""
    return fleet(
        """
        from pytest_gpufleet import MiB, bus_bandwidth, measure, not_applicable

        def test_bandwidth(nccl_group, judge):
            judge(measure(nccl_group, bus_bandwidth, "all_reduce", 1 * MiB))

        def test_gpu_only():
            '''Something with <GPUs> & more

            What to do about it.
            '''
            not_applicable("there is no GPU")
        """
    )


@pytest.fixture
def folder(rehearsed, tmp_path):
    """A copy of its folder, to do to it what one likes."""
    return shutil.copytree(rehearsed.folders[0], tmp_path / "run")


def contract(path, **limits):
    return runs.written(path, runs.contract(**limits))


def test_nothing_is_added_after_the_verdict(tmp_path):
    evidence = Evidence(tmp_path / "evidence.jsonl")
    evidence.add(Verdict(verdict="INCOMPLETE", reasons=[]))
    evidence.seal()
    evidence.add(Telemetry(sample=Sample(0.0, ())))  # of a GPU that hung
    assert evidence.sha256 == sha256(evidence.path)
    assert not evidence.record.telemetry


def test_an_interrupted_run_says_so_everywhere(fleet, tmp_path, gpufleet):
    run = fleet("def test_x(): raise KeyboardInterrupt")
    (folder,) = run.folders
    document = json.loads((folder / "summary.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert run.status == document["exit_status"] == 2
    assert run.record.broken == "the run was interrupted"
    assert gpufleet("verify", folder)[0] == 0
    assert gpufleet("judge", folder)[0] == 10


@pytest.mark.parametrize(("values", "failed"), [({}, 0), ({"busbw world": 300.0}, 1), ({"busbw world": math.nan}, 2)])
def test_the_summary_is_as_its_schema_says(tmp_path, values, failed):
    folder = runs.record(tmp_path / "run", values=values, limits=runs.written(tmp_path / "contract.toml"))
    document = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)  # no NaN
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)
    assert (document["verdict"], document["exit_status"]) == (("REJECTED", 1) if values else ("ACCEPTED", 0))
    counts = {"passed": len(document["checks"]) - failed, **({"failed": failed} if failed else {})}
    assert document["counts"]["checks"] == counts
    figure = document["findings"][0]
    assert (figure["state"], figure["missed"]) == (("missed", ["world"]) if values else ("met", []))
    assert figure["limit"]["value"] == 350.0
    assert document["gpus"][3]["serial"] == "node7-S3"


def test_the_schema_of_the_summary_is_printed_and_in_the_repository_and_takes_nothing_else(rehearsed):
    command, printed = "python -m pytest_gpufleet.run.summary", subprocess.PIPE
    shown = subprocess.run([sys.executable, *command.split()[1:]], stdout=printed, check=True, text=True).stdout
    assert (ROOT / "docs/summary.schema.json").read_text() == shown, f"{command} > docs/summary.schema.json"
    document = json.loads((rehearsed.folders[0] / "summary.json").read_text())
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)
    assert document["exit_status"] == rehearsed.status == 0
    counts = {"checks": {"fine": 1}, "findings": {}}
    for wrong in (
        {"verdict": "FINE"}, {"evidence_sha256": ""}, {"more": 1}, {"exit_status": None}, {"counts": counts},
    ):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, **wrong}, SCHEMA)


def test_a_run_that_died_has_a_report_after_all(tmp_path, gpufleet):
    folder = runs.record(tmp_path / "run", ends=False)
    evidence = folder / "evidence.jsonl"
    evidence.write_bytes(evidence.read_bytes()[:-40])  # in the middle of a line
    status, text = gpufleet("report", folder)
    assert (status, text.partition("INCOMPLETE")[0]) == (0, f"{folder}/report.html: ")
    page = (folder / "report.html").read_text()
    assert "the run did not come to its end" in page
    assert "test_each_gpu_alone" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)  # one file, no network
    document = json.loads((folder / "summary.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert (document["verdict"], document["exit_status"]) == ("INCOMPLETE", 10)
    status, text = gpufleet("verify", folder)
    assert (status, "INCOMPLETE; the run did not come to its end" in text) == (0, True)
    folder = runs.record(tmp_path / "failed", failed={runs.ALONE: "other"}, ends=False)
    assert f"{folder}/report.html: REJECTED" in gpufleet("report", folder)[1]


def test_both_ways_to_the_report_show_the_same(folder, gpufleet):
    written = (folder / "report.html").read_text()
    again = folder / "again.html"
    assert gpufleet("report", folder, "-o", again) == (0, f"{again}: REHEARSAL")
    assert (folder / "report.html").read_text() == written
    # matplotlib's drawings have ids of their own in each process.
    by_the_run, by_the_command = (re.sub(r"[mp][0-9a-f]{10}", "", text) for text in (written, again.read_text()))
    assert by_the_run == by_the_command
    assert "Something with &lt;GPUs&gt; &amp; more" in by_the_run
    assert gpufleet("report", folder, "--language=zh")[0] == 0  # the same evidence: no harm in writing it again
    assert gpufleet("verify", folder)[0] == 0
    assert (folder / "report.html").read_text() != written


SLOW = {"values": {"solo_train_throughput gpu2": 5000.0}}
OTHER_LIMITS = [  # the limits of the run, how it went, and the limits that it is held against
    ({}, {}, {}, 0),
    ({}, {}, {"busbw": 370.0}, 1),
    ({"busbw": 370.0}, {}, {}, 0),  # a check that failed for its limit alone passes
    ({"busbw": 370.0}, {}, {"busbw": 365.0}, 1),
    ({"busbw": 370.0}, {"failed": {f"{runs.BANDWIDTH}[0]": "other"}}, {}, 1),
    ({}, {"values": {"busbw world": math.nan}}, {"busbw": 1.0}, 1),
    ({}, SLOW, {"solo_train_throughput": 1.0}, 1),  # than its peers
    ({}, {"ends": False}, {}, 10),
]


@pytest.mark.parametrize("case", OTHER_LIMITS)
def test_recorded_figures_meet_other_limits_or_not(tmp_path, gpufleet, case):
    limits, changes, judged_by, status = case
    verdict = {0: "ACCEPTED", 1: "REJECTED", 10: "INCOMPLETE"}[status]
    folder = runs.record(tmp_path / "run", limits=contract(tmp_path / "then.toml", **limits), **changes)
    before = sha256(folder / "evidence.jsonl")
    path, page = contract(tmp_path / "contract.toml", **judged_by), tmp_path / "judged.html"
    ended, text = gpufleet("judge", folder, "--fleet-profile", path, "-o", page)
    assert (ended, text.split()[0].rstrip(";")) == (status, verdict)
    assert "judged again with the limits of profile Contract 4711" in text
    assert f"<strong>{verdict}</strong>" in page.read_text()
    assert "It is not the verdict that the run itself came to" in page.read_text()
    assert "Not the verdict of the run itself" in page.read_text().partition('id="fleet-gpus"')[0]
    assert "Signatures" not in page.read_text()
    assert sha256(folder / "evidence.jsonl") == before


def test_a_rehearsal_stays_one(folder, tmp_path, gpufleet):
    status, text = gpufleet("judge", folder, "--fleet-profile", contract(tmp_path / "contract.toml", busbw=1e9))
    assert (status, text.split()[0]) == (0, "REHEARSAL")
    status, text = gpufleet("calibrate", folder, "-o", tmp_path / "my.toml")
    assert (status, "run is a rehearsal: its measurements are those of CPU ranks" in text) == (1, True)


def test_an_outlier_is_named_by_node_and_gpu(tmp_path, gpufleet):
    slow = {"solo_train_throughput gpu2": 5200.0}
    folders = [
        runs.record(tmp_path / host, host, slow if host == "node9" else None) for host in ("node7", "node8", "node9")
    ]
    page = tmp_path / "comparison.html"
    status, text = gpufleet("compare", *folders, "-o", page)
    assert status == 1
    assert "1 outlier; the worst: training throughput, each GPU alone of GPU 2 in node9, 16.1 % worse." in text
    for shown in (text, page.read_text()):
        assert "node9-S2" in shown
        assert "node9-S1" not in shown
    assert not re.search(r"(src|href)=", page.read_text())
    document = json.loads(gpufleet("compare", "--json", *folders)[1])
    (outlier,) = document["outliers"]
    named = [outlier[name] for name in ("run", "place", "value", "reference")]
    assert named == ["node9", "gpu2", 5200.0, 6200.0]
    assert [figure["metric"] for figure in document["figures"]].count("busbw") == 2


def test_a_figure_with_a_limit_is_compared_though_it_requires_none_and_one_that_is_only_shown_is_not(gpufleet):
    """On four real H200 another process halved GPU 2, and the limits of all matrix products were missed."""
    status, text = gpufleet("compare", NEIGHBOUR.with_name("h200x4-c"), NEIGHBOUR)
    assert status == 1
    assert "12 outliers; the worst: matrix product of GPU 2 in h200x4-neighbour, 58.2 % worse." in text
    outliers = text[text.index("Outliers, the worst first") : text.index("Measurements: the worst place of each run")]
    for precision in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8"):
        assert f"matrix product, {precision}, all GPUs at once" in outliers
    assert "after rest" not in outliers  # which no limit can be given for
    status, text = gpufleet("compare", *(NEIGHBOUR.with_name(f"h200x4-{name}") for name in "abc"))
    assert (status, "No outlier among" in text) == (0, True)


def test_compare_says_what_it_cannot_use_and_what_makes_runs_hard_to_compare(tmp_path, folder, gpufleet):
    run = runs.record(tmp_path / "good")
    other = runs.record(tmp_path / "other", machine=runs.topology("node7b", "NVIDIA H100 80GB HBM3", "575.57.08"))
    status, text = gpufleet("compare", run, other)
    assert (status, "driver: 580.159.04 (good), 575.57.08 (other)" in text) == (0, True)
    assert "GPU model: NVIDIA X9000 (good), NVIDIA H100 80GB HBM3 (other)" in text
    assert gpufleet("compare", run, run)[1] == "gpufleet: the same folder is given twice"
    assert "is not the folder of a run" in gpufleet("compare", run, tmp_path)[1]
    status, text = gpufleet("compare", run, folder)
    assert status == 1
    assert "There is nothing to compare: the runs have no measurement in common." in text
    assert "CPU ranks (rehearsal)" in text


def test_a_machine_over_time(tmp_path, gpufleet):
    """GPU 2 loses 3 % from run to run, and was moved meanwhile; everything else only varies."""
    days = {"may": 6200.0, "june": 6014.0, "july": 5830.0}
    folders = [
        runs.record(
            tmp_path / day, values={"solo_train_throughput gpu2": value, "busbw world": 360.0 - number},
            utc=f"2026-1{number}-21T01:40:06+00:00",
        )
        for number, (day, value) in enumerate(days.items())
    ]  # fmt: skip
    page = tmp_path / "drift.html"
    status, text = gpufleet("compare", "--same-machine", *folders, "-o", page)
    assert status == 1
    worst = "training throughput, each GPU alone of GPU 2, 5.97 % worse."
    assert f"1 measurement got worse in july; the worst: {worst}" in text
    for shown in (text, page.read_text()):
        assert ("node7-S2" in shown, "node7-S1" in shown) == (True, False)
    status, text = gpufleet("compare", "--same-machine", *folders[:1], *folders[:0:-1], "--json")
    document = json.loads(text)
    assert (status, list(document["runs"]), document["compared"]) == (1, list(days), 6)
    (worse,) = document["worse"]
    assert (worse["place"], worse["gpus"], worse["history"]) == ("gpu2", ["GPU-node7-2"], days)
    june = runs.record(tmp_path / "healthy", values={"busbw world": 357.0}, utc="2026-12-21T01:40:06+00:00")
    status, text = gpufleet("compare", "--same-machine", june, folders[0])
    assert (status, "Nothing got worse in healthy: 6 measurements compared with 1 earlier run." in text) == (0, True)
    status, text = gpufleet("compare", "--same-machine", folders[0], runs.record(tmp_path / "b", "node8"))
    assert (status, "There is nothing to compare: no earlier run has a measurement of a GPU of b" in text) == (1, True)


LEFT = ("evidence.jsonl", "summary.json", "report.html", "junit.xml", "report.txt", "link.html")
WRITING = ("judge {} -o", "report {} -o", "compare {} {} -o", "calibrate {} {} -o")


@pytest.mark.parametrize(
    ("command", "name"), [*((WRITING[0], name) for name in LEFT), *((command, LEFT[0]) for command in WRITING[1:])]
)
def test_what_a_run_left_is_not_replaced(tmp_path, gpufleet, command, name):
    other, one = (runs.record(tmp_path / host, host) for host in ("node7", "node8"))
    (other / "link.html").symlink_to("evidence.jsonl")
    before = {path: path.read_bytes() for path in other.iterdir()}
    assert gpufleet(*command.format(other, one).split(), other / name) == (
        1, f"gpufleet: {other / name} belongs to the run in {other} and is left as it is: name another file",
    )  # fmt: skip
    assert {path: path.read_bytes() for path in other.iterdir()} == before


def test_the_profile_is_not_replaced_by_the_judgement(tmp_path, gpufleet):
    folder, path = runs.record(tmp_path / "run"), contract(tmp_path / "my.toml")
    (linked := tmp_path / "judged.html").hardlink_to(path)
    before = path.read_text()
    for output in (path, linked):
        said = f"gpufleet: {output} is what this command reads and is left as it is: name another file"
        assert gpufleet("judge", folder, "--fleet-profile", path, "-o", output) == (1, said)
    assert path.read_text() == before


def test_a_file_is_replaced_as_a_whole(tmp_path, gpufleet):
    folder, page = runs.record(tmp_path / "run"), tmp_path / "page.html"
    assert gpufleet("report", folder, "-o", page)[0] == 0
    with page.open() as reader:
        assert gpufleet("report", folder, "-o", page)[0] == 0
        assert reader.read().endswith("</html>")  # whoever has it open sees no half of the new one
    assert page.read_text().endswith("</html>")
    assert page.stat().st_mode & 0o044
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    assert gpufleet("report", folder, "-o", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(("ends", "status"), [(False, 10), (True, 0)])
def test_a_reader_that_leaves_early_changes_nothing(tmp_path, ends, status):
    limits, page = runs.written(tmp_path / "contract.toml"), tmp_path / "page.html"
    folder = runs.record(tmp_path / "run", limits=limits, ends=ends)
    line = [sys.executable, "-m", "pytest_gpufleet", "judge", folder, "--fleet-profile", limits, "-o", page]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # before anything is printed
        assert [line for line in process.stderr.read().splitlines() if "missing, as" not in line] == []
        assert process.wait(60) == status
    assert page.exists()


HEAVY = ("pytest", "_pytest", "torch", "cloudpickle", "pytest_gpufleet.world", "pytest_gpufleet.probes")
RUN = f"""
import json, sys
from pytest_gpufleet.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit:
        pass
    loaded = [name for name in {HEAVY} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
COMMANDS = [
    ["--version"],
    ["verify", EVIDENCE / "h200x4-a"],
    ["report", EVIDENCE / "h200x4-a", "-o", "report.html"],
    ["judge", EVIDENCE / "h200x4-a"],
    ["compare", EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-b"],
    ["fleet", EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-b", "-o", "fleet.html"],
    ["calibrate", EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-b", "-o", "limits.toml"],
    ["sign", EVIDENCE / "h200x4-a", "--key=missing", "--as=ann"],
    ["snapshot"],
    ["monitor", "--once"],
]  # fmt: skip


def test_no_command_loads_anything_heavy(tmp_path):
    command = [sys.executable, "-c", RUN, json.dumps(COMMANDS, default=str)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("missing", "what"), [("jinja2", "report"), ("msgspec", "report"), ("tomli_w", "order")])
def test_what_a_command_needs_and_is_not_installed_is_named(tmp_path, missing, what):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['{missing}'] = None")
    command = [sys.executable, "-m", "pytest_gpufleet", what, EVIDENCE / "h200x4-a", "-o", tmp_path / "report.html"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    package = missing.replace("_", "-")
    how = f"gpufleet: {package} is not installed, which this needs: {sys.executable} -m pip install {package}"
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, how)


def test_a_ctrl_c_while_a_command_is_still_loading_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Stop:\n    def find_spec(self, name, *_):\n"
        "        if name == 'jinja2': raise KeyboardInterrupt\nsys.meta_path.insert(0, Stop())"
    )
    command = [sys.executable, "-m", "pytest_gpufleet", "report", EVIDENCE / "h200x4-a", "-o", tmp_path / "report.html"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda folder: folder.name)
def test_a_recorded_run_meets_the_limits_that_are_made_of_it(recorded, tmp_path, gpufleet):
    record, twin = read(recorded / "evidence.jsonl"), shutil.copytree(recorded, tmp_path / "twin")
    status, text = gpufleet("compare", recorded, twin)
    assert (status, "No outlier" in text) == (0, True)
    status, text = gpufleet("calibrate", recorded, "-o", tmp_path / "my.toml", "--replace-shipped")
    assert status == (0 if record.verdict in ("ACCEPTED", "INCOMPLETE") and not record.broken else 1)
    if status == 0:
        _, text = gpufleet("judge", recorded, "--fleet-profile", tmp_path / "my.toml")
        assert "Missed limits" not in text
        assert "not judged" not in text


STEERS = "\x1b[2J\x1b]0;taken\x07\u202e\nDIR: evidence, report and summary belong together: ACCEPTED"
TAKEN = re.compile(r"[\x1b\x07\u202e]|^DIR: evidence", re.MULTILINE)


def test_no_word_of_a_run_steers_the_terminal_or_adds_a_line(tmp_path, capsys):
    """Evidence comes from those who sell the machine."""
    for name, event, key in (("a", "run", "host"), ("b", "run", "plugin"), ("c", "check_finished", "id")):
        folder = tmp_path / (name + STEERS)
        folder.mkdir()
        lines = (NEIGHBOUR / "evidence.jsonl").read_text(encoding="utf-8").splitlines()
        number, found = next((n, each) for n, each in enumerate(map(json.loads, lines)) if each["event"] == event)
        (found if key in found else found["check"])[key] += STEERS
        lines[number] = json.dumps(found)
        (folder / "evidence.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps({"schema": STEERS, STEERS: 1}), encoding="utf-8")
        more = {"verify": [], "report": [], "judge": [], "compare": [NEIGHBOUR], "fleet": [NEIGHBOUR]}
        for command, arguments in [*more.items(), ("report", ["-o", tmp_path / "x"])]:
            cli.main([command, str(folder), *map(str, arguments)])
            printed = "".join(capsys.readouterr())
            assert printed
            assert not TAKEN.search(printed), command
