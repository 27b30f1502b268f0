"""Where settings may stand, which of them make a run, and whose a name is."""

import json
from datetime import datetime

import pytest

from tests.conftest import FILES, INNER

WRITES_OPTIONS = """
    import json
    from dataclasses import asdict
    from pathlib import Path
    from pytest_gpufleet.plugin import options

    def test_it(pytestconfig):
        Path("options.json").write_text(json.dumps(asdict(options.from_config(pytestconfig)), default=str))
"""
INI = """
    [pytest]
    fleet_dir = site/reports
    fleet_timeout = 7
    fleet_deadline = 5s
    fleet_interval = 2.5
    fleet_prometheus = /var/lib/gpufleet.prom
    fleet_profile = site.toml
    fleet_order = bought.toml
"""


def test_a_site_says_its_settings_in_an_ini_file(run_pytest):
    """And the command line wins; neither makes a run."""
    options = ("--fleet-timeout=9", "--fleet-level=quick", "--fleet-monitor")
    run = run_pytest(
        "deep", *options, files={"pytest.ini": INI, "deep/test_inner.py": WRITES_OPTIONS}, PYTHONOPTIMIZE=""
    )
    assert (run.status, (run.root / "site").exists()) == (0, False)
    assert "gpufleet" not in run.text.partition("plugins:")[2].partition("\n")[2]
    read = json.loads((run.root / "options.json").read_text())
    beside = [f"{run.root}/{name}" for name in ("pytest.ini", "site.toml", "bought.toml")]
    assert read.items() >= {
        "folder": f"{run.root}/site/reports", "timeout": 9.0, "deadline": 5.0, "interval": 2.5,
        "prometheus": "/var/lib/gpufleet.prom", "profile": beside[1], "order": beside[2], "asked": False,
    }.items()  # fmt: skip
    assert read["paths"] == ["deep", *beside]


@pytest.mark.parametrize("given", ["ini", "command line"])
def test_a_run_in_the_home_has_all_of_its_files_in_one_folder(run_pytest, tmp_path, given):
    where = "~/runs of $HOST"
    options = [f"--fleet-dir={where}"] if given == "command line" else []
    files = {"pytest.ini": f"[pytest]\nfleet_dir = {where}\n", "test_inner.py": "def test_it(): pass"}
    run = run_pytest("--rehearse=1", *options, files=files, HOME=str(tmp_path), HOST="node7")
    (folder,) = (tmp_path / "runs of node7").iterdir()
    assert {file.name for file in folder.iterdir()} == FILES
    assert not (run.root / "~").exists()


def test_a_setting_that_makes_no_sense_is_reported_with_its_file(run_pytest):
    run = run_pytest(files={"pytest.ini": "[pytest]\nfleet_interval = often\n", "test_inner.py": WRITES_OPTIONS})
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert f"fleet_interval in {run.root}/pytest.ini: 'often' is not a number of seconds" in run.text


def test_options_of_many_nodes_may_be_given_where_the_ini_file_has_their_number(run_pytest):
    files = {"pytest.ini": "[pytest]\nnodes = 2\n", "test_inner.py": "def test_it(): pass"}
    assert run_pytest("--fleet-insecure", "--collect-only", files=files).status == 0


def test_notes_of_the_command_line_stand_beside_those_of_the_ini_file(fleet):
    ini = "[pytest]\nfleet_note =\n    location = rack 12, unit 4\n    order=1\n"
    run = fleet(
        "def test_it(): pass", "--fleet-note", "order=4711", "--fleet-note=remarks=a=b", files={"pytest.ini": ini}
    )
    assert run.record.run.notes == {"location": "rack 12, unit 4", "order": "4711", "remarks": "a=b"}
    assert run.record.lasted > 0
    begin, end = map(datetime.fromisoformat, (run.record.run.utc, run.record.ended))
    assert -0.1 < (end - begin).total_seconds() - run.record.lasted < 1.1  # utc has no fraction
    said = json.loads((run.folders[0] / "summary.json").read_text())["run"]
    assert said["notes"] == run.record.run.notes
    assert (said["ended"], said["seconds"]) == (run.record.ended, run.record.lasted)


@pytest.mark.parametrize(
    ("level", "folder", "status"),
    [("burnin", "too-long" * 32, pytest.ExitCode.USAGE_ERROR), ("burnin", ".", 0), ("quick", "no/such", 0)],
)
def test_a_drive_is_tested_in_a_folder_that_is_there(run_pytest, level, folder, status):
    """Else the check that was asked for would not apply, and leave nothing open. Other levels write to no drive."""
    ini = f"[pytest]\nfleet_disk_folder = {folder}\n"
    files = {"test_inner.py": "def test_it(): pass", "pytest.ini": ini}
    run = run_pytest("--rehearse=1", "--fleet-dir=runs", f"--fleet-level={level}", files=files)
    assert (run.status, len(run.folders)) == (status, status == 0), run.text


@pytest.mark.parametrize("before", [["--rehearse"], ["--rehearse=3"]])
def test_rehearse_takes_no_path_away(run_pytest, before):
    """Nor the options that the conftest.py of that path adds."""
    conftest = "def pytest_addoption(parser): parser.addoption('--mine')"
    tests = {"checks/test_a.py": "def test_a(): pass", "test_b.py": "def test_b(): 1 / 0"}
    run = run_pytest("--fleet-dir=runs", *before, "checks", "--mine=1", files={"checks/conftest.py": conftest, **tests})
    assert (run.status, run.outcomes) == (0, {"test_a": "passed"}), run.text


STRANGE = """
    [pytest]
    markers =
        level(number): how hard it is
        spmd: something else
        world_size(how): of the map
        needs(what): to drink
        figures(how many): of speech
        chapter(number): of the manual
        proves_sound(what): of the speakers
        at_the_end(of what): it stands
        fresh_world(what): is new
    addopts = --strict-markers -W error
"""


def test_names_of_others_are_left_alone(run_pytest):
    run = run_pytest(files={"pytest.ini": STRANGE, "test_strangers.py": INNER / "strangers.py"})
    assert run.status == 0, run.text
    assert "4 passed" in run.text
    assert "warning" not in run.text
