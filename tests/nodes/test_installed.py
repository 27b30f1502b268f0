"""What makes an installation another one."""

import pytest

from pytest_gpufleet.nodes import same_install


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checks" / "inner").mkdir(parents=True)
    (tmp_path / "checks" / "test_a.py").write_text("a\n")
    (tmp_path / "checks" / "inner" / "conftest.py").write_text("b\n")
    return tmp_path


def test_the_same_files_elsewhere_are_the_same_suite(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (folder / "checks").rename(other / "checks")
    before = same_install.suite(other, ["checks"])
    (other / "checks").rename(folder / "checks")
    assert same_install.suite(folder, ["checks"]) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda checks: (checks / "test_a.py").write_text("A\n"),
        lambda checks: (checks / "test_a.py").unlink(),
        lambda checks: (checks / "test_a.py").rename(checks / "test_b.py"),
        lambda checks: (checks / "inner" / "test_c.py").touch(),
    ],
    ids=["changed", "removed", "renamed", "added"],
)
def test_other_files_are_another_suite(folder, change):
    before = same_install.suite(folder, ["checks"])
    change(folder / "checks")
    assert same_install.suite(folder, ["checks"]) != before
    assert same_install.suite(folder, ["checks::test_it"]) == same_install.suite(folder, ["checks"])


@pytest.mark.parametrize("place", ["conftest.py", "checks/conftest.py"])
def test_another_conftest_on_the_way_to_a_file_is_another_suite(folder, place):
    before = same_install.suite(folder, ["checks/test_a.py"])
    (folder / place).write_text("fixtures")
    assert same_install.suite(folder, ["checks/test_a.py"]) != before


def test_what_pytest_does_not_look_at_is_no_part_of_it(folder):
    before = same_install.suite(folder, ["checks"])
    (folder / "checks" / ".venv").mkdir()
    (folder / "checks" / ".venv" / "test_a.py").write_text("of somebody else")
    (folder / "checks" / "notes.txt").write_text("to do")
    assert same_install.suite(folder, ["checks"]) == before


def test_a_file_that_is_not_there_makes_another_one(folder):
    before = same_install.suite(folder, ["test_none.py"])
    (folder / "test_none.py").write_text("it is there now")
    assert same_install.suite(folder, ["test_none.py"]) != before


def test_where_the_folder_of_the_run_is_not_there_is_no_suite(folder):
    assert same_install.suite(folder / "none", []) == ""
    assert same_install.suite(folder, []) != ""


def test_the_package_has_a_sum():
    assert len(same_install.package()) == 64


def test_each_node_says_which_version_carries_its_messages(monkeypatch):
    monkeypatch.setattr(same_install, "version", {"ray": "2.59.0"}.__getitem__)
    assert [same_install.transport(name) for name in ("local", "ray")] == ["local", "ray 2.59.0"]
