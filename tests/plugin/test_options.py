"""Where settings may stand, which of them make a run, and whose a name is."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest

from tests.conftest import INNER

INI = """
fleet_dir = site/reports
fleet_timeout = 7
fleet_deadline = 5s
fleet_interval = 2.5
fleet_prometheus = /var/lib/gpufleet.prom
fleet_profile = site.toml
fleet_order = bought.toml
"""


def test_a_site_says_its_settings_in_an_ini_file(asked, tmp_path):
    """And the command line wins; neither makes a run."""
    (tmp_path / "deep").mkdir()
    read = asked("deep", "--fleet-timeout=9", "--fleet-level=quick", "--fleet-monitor", ini=INI)
    beside = [tmp_path / name for name in ("pytest.ini", "site.toml", "bought.toml")]
    assert asdict(read).items() >= {
        "folder": tmp_path / "site/reports", "timeout": 9.0, "deadline": 5.0, "interval": 2.5, "asked": False,
        "prometheus": Path("/var/lib/gpufleet.prom"), "profile": beside[1], "order": beside[2],
    }.items()  # fmt: skip
    assert read.paths == ("deep", *map(str, beside))


def test_home_and_variables_are_filled_in_wherever_a_path_is_given(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HOST", "node7")
    where = "~/runs of $HOST"
    for read in (asked(f"--fleet-dir={where}"), asked(ini=f"fleet_dir = {where}")):
        assert read.folder == tmp_path / "runs of node7"


def test_a_setting_that_makes_no_sense_is_reported_with_its_file(asked, tmp_path):
    with pytest.raises(pytest.UsageError, match=f"fleet_interval in {tmp_path}/pytest.ini: 'often' is not a number of"):
        asked(ini="fleet_interval = often")


def test_options_of_many_nodes_may_be_given_where_the_ini_file_has_their_number(asked):
    assert asked("--fleet-insecure", ini="nodes = 2").nodes == 2


@pytest.mark.parametrize(
    ("level", "folder", "refused"), [("burnin", "no/such", True), ("burnin", ".", False), ("quick", "no/such", False)]
)
def test_a_drive_is_tested_in_a_folder_that_is_there(asked, level, folder, refused):
    """Else the check that was asked for would not apply, and leave nothing open. Other levels write to no drive."""
    with pytest.raises(pytest.UsageError, match="is no folder") if refused else nullcontext():
        assert asked("--rehearse=1", f"--fleet-level={level}", ini=f"fleet_disk_folder = {folder}").level == level


def test_notes_of_the_command_line_stand_beside_those_of_the_ini_file(fleet):
    ini = "[pytest]\nfleet_note =\n    location = rack 12, unit 4\n    order=1\n"
    given = ("--fleet-note", "order=4711", "--fleet-note=remarks=a=b")
    run = fleet("def test_it(): pass", *given, files={"pytest.ini": ini})
    assert run.record.run.notes == {"location": "rack 12, unit 4", "order": "4711", "remarks": "a=b"}
    assert run.record.lasted > 0
    begin, end = map(datetime.fromisoformat, (run.record.run.utc, run.record.ended))
    assert -0.1 < (end - begin).total_seconds() - run.record.lasted < 1.1  # utc has no fraction
    said = json.loads((run.folders[0] / "summary.json").read_text())["run"]
    assert said["notes"] == run.record.run.notes
    assert (said["ended"], said["seconds"]) == (run.record.ended, run.record.lasted)


def test_rehearse_takes_no_path_away(run_pytest):
    """Nor the options that the conftest.py of that path adds."""
    conftest = "def pytest_addoption(parser): parser.addoption('--mine')"
    files = {"checks/test_a.py": "def test_a(): 1", "test_b.py": "def test_b(): 1 / 0", "checks/conftest.py": conftest}
    run = run_pytest("--fleet-dir=runs", "--rehearse", "checks", "--mine=1", files=files)
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
