"""What makes an installation another one; nodes that do not have the same are named, by what differs."""

import shutil

import msgspec
import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.suite import code
from pytest_gpufleet.nodes import agent_process
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.messages import DialIn

OWN = DialIn("head", version="1", package="p", suite="s", python="3.12.3")


def other(name, **differs):
    return msgspec.structs.replace(OWN, name=name, **differs)


def test_nodes_with_the_same_installation_are_welcome():
    agent_process.refuse_others(OWN, {"gf0": other("gf0"), "gf1": other("gf1", index=1)})


@pytest.mark.parametrize(("differs", "described"), [
    ({"python": "3.12.4"}, "gf1: Python 3.12.4."),
    ({"package": "q"}, "gf1: other files of pytest-gpufleet."),
    ({"package": "q", "version": "2"}, "gf1: pytest-gpufleet 2."),
    ({"suite": "t", "python": "3.13.0"}, "gf1: Python 3.13.0, other checks, conftest"),
    ({"suite": ""}, f"gf1: {agent_process.NO_FOLDER}."),
    ({"suite": agent_process.EMPTY}, f"gf1: {agent_process.NO_CHECKS}."),
])  # fmt: skip
def test_a_node_with_another_one_is_named_with_what_differs(differs, described):
    with pytest.raises(Refused) as refused:
        agent_process.refuse_others(OWN, {"gf0": other("gf0"), "gf1": other("gf1", **differs)})
    assert described in str(refused.value)
    assert "gf0" not in str(refused.value)


def test_nodes_that_differ_in_the_same_way_are_named_together():
    nodes = {"gf0": other("gf0"), **{name: other(name, package="q") for name in ("gf1", "gf2", "gf3")}}
    with pytest.raises(Refused, match=r"gf1, gf2, gf3: other files"):
        agent_process.refuse_others(OWN, nodes)


def test_what_a_node_of_any_version_dials_in_with_can_be_read():
    sent = codec.packed({"is": "dial in", "name": "gf1", "version": "0.9", "python": "3.12.3", "new": 1})
    with pytest.raises(Refused, match=r"gf1: pytest-gpufleet 0\.9"):
        agent_process.refuse_others(OWN, {"gf1": codec.unpacked(sent, DialIn)})


def test_what_this_process_has_is_of_its_package_and_of_the_suite(folder):
    own = agent_process.own_install(AgentSettings(str(folder), suite=("checks",)))
    assert (own.package, own.suite) == (code(), agent_process.suite(folder, ["checks"]))
    assert len(own.package) == 64


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checks" / "inner").mkdir(parents=True)
    (tmp_path / "checks" / "test_a.py").write_text("a\n")
    (tmp_path / "checks" / "inner" / "conftest.py").write_text("b\n")
    return tmp_path


def test_the_same_files_elsewhere_are_the_same_suite(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (folder / "checks").rename(other / "checks")
    before = agent_process.suite(other, ["checks"])
    (other / "checks").rename(folder / "checks")
    assert agent_process.suite(folder, ["checks"]) == before


@pytest.mark.parametrize(("suite", "change", "another"), [
    ("checks", lambda at: (at / "checks/test_a.py").write_text("A\n"), True),
    ("checks", lambda at: (at / "checks/test_a.py").unlink(), True),
    ("checks", lambda at: (at / "checks/test_a.py").rename(at / "checks/test_b.py"), True),
    ("checks", lambda at: (at / "checks/inner/test_c.py").touch(), True),
    ("checks/test_a.py", lambda at: (at / "conftest.py").write_text("fixtures"), True),
    ("checks/test_a.py", lambda at: (at / "checks/conftest.py").write_text("fixtures"), True),
    ("test_none.py", lambda at: (at / "test_none.py").write_text("it is there now"), True),
    ("checks", lambda at: (at / "checks/notes.txt").write_text("to do"), False),
    ("checks", lambda at: shutil.copytree(at / "checks/inner", at / "checks/.venv"), False),
])  # fmt: skip
def test_files_that_pytest_looks_at_make_the_suite(folder, suite, change, another):
    before = agent_process.suite(folder, [suite])
    change(folder)
    assert (agent_process.suite(folder, [suite]) != before) is another
    assert agent_process.suite(folder, [f"{suite}::test_it"]) == agent_process.suite(folder, [suite])


def test_an_empty_folder_of_checks_is_another_thing(folder):
    assert agent_process.suite(folder, ["nothing", "checks/test_b.py"]) == agent_process.EMPTY


def test_where_the_folder_of_the_run_is_not_there_is_no_suite(folder):
    assert agent_process.suite(folder / "none", []) == ""
    assert agent_process.suite(folder, []) != ""
