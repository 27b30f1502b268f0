"""Nodes that do not have the same software are named, by what differs."""

import pytest

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.nodes import same_install
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.messages import Greeting
from tests.nodes.fake_transport import hello

OWN = Greeting(host="head", version="1", package="p", suite="s", python="3.12.3", transport="fake")


def test_nodes_with_the_same_installation_are_welcome_whatever_else_differs():
    nodes = {"gf0": hello(0), "gf1": hello(1, serial="X", machine={"torch": "2.0"}, clock=9.0)}
    same_install.refuse_others(OWN, nodes)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"python": "3.12.4"}, "gf1: Python 3.12.4."),
        ({"transport": "ray 2.59.0"}, "gf1: ray 2.59.0."),
        ({"package": "q"}, "gf1: other files of pytest-gpufleet."),
        ({"package": "q", "version": "2"}, "gf1: pytest-gpufleet 2."),
        ({"suite": "t", "python": "3.13.0"}, "gf1: Python 3.13.0, other checks, conftest"),
        ({"suite": ""}, f"gf1: {same_install.NO_FOLDER}."),
    ],
)
def test_a_node_with_another_one_is_named_with_what_differs(other, told):
    with pytest.raises(Refused) as refused:
        same_install.refuse_others(OWN, {"gf0": hello(0), "gf1": hello(1, **other)})
    assert told in str(refused.value)
    assert "gf0" not in str(refused.value)


def test_nodes_that_differ_in_the_same_way_are_named_together():
    nodes = {"gf0": hello(0), **{f"gf{node}": hello(node, package="q") for node in (1, 2, 3)}}
    with pytest.raises(Refused, match=r"gf1, gf2, gf3: other files"):
        same_install.refuse_others(OWN, nodes)


def test_a_node_whose_hello_cannot_be_read_is_named_by_its_greeting():
    with pytest.raises(Refused, match=r"gf1: pytest-gpufleet 0\.9"):
        same_install.refuse_others(OWN, {"gf1": Greeting("gf1", "0.9", "q", "s", "3.12.3", "fake")})


def test_files_that_are_changed_make_another_installation(tmp_path):
    (tmp_path / "checks").mkdir()
    check = tmp_path / "checks" / "test_a.py"
    check.write_text("one")
    settings = AgentSettings(str(tmp_path), suite=("checks",))
    before = same_install.own(settings, "local")
    assert before == same_install.own(settings, "local")
    check.write_text("two")
    after = same_install.own(settings, "local")
    assert (after.suite != before.suite, after.package) == (True, before.package)
