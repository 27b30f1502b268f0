"""A real cluster of Ray, with a token: what becomes of a run when its nodes come to harm. It is on a host that is not
there: nobody reaches what Ray listens on, and nothing of it is left when the host ends."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.nodes.hosts import hosts, possible

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
LONG = 400.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder():
    """Short: Ray makes sockets in it, whose paths have 107 characters at most."""
    made = tempfile.mkdtemp(prefix="gpufleet-ray-", dir="/tmp")
    yield Path(made)
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def told(folder):
    """What a controller has seen, by tests/nodes/ray_scenario.py."""
    if why := possible():
        pytest.skip(why)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-for-tests-of-this-very-cluster",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with hosts(1, folder) as (host,):
        host.do("ip", "route", "add", "default", "dev", "rail0")  # by which Ray finds the address of its node
        scenario = (sys.executable, "-m", "tests.nodes.ray_scenario", folder)
        process = host.start(*scenario, environment=environment, output=folder / "output", folder=ROOT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LONG)
    process.wait()
    assert (folder / "told.json").exists(), (folder / "output").read_text()[-4000:]
    return json.loads((folder / "told.json").read_text())


def test_an_agent_starts_on_each_node_and_answers(told):
    assert told["started"] == told["answers"] == [0, 1, 2]
    assert len(set(told["names"])) == 3
    assert told["transport"]


def test_strangers_are_kept_out_and_that_is_known(told):
    assert told["secured"] == "token"
    assert "asks for a token" in told["wrong token"]


def test_a_node_is_lost_at_once_when_its_actor_or_its_agent_is_killed(told):
    ((node, why),) = told["actor killed"]
    assert (node, why.partition(":")[0]) == (1, "Ray says of its agent")
    ((node, why),) = told["agent killed"]
    assert (node, why.startswith("its agent died by SIGKILL")) == (2, True)


def test_a_frozen_node_is_lost_and_answers_when_it_is_back_but_takes_no_part(told):
    ((node, why),) = told["agent frozen"]
    assert (node, why.startswith("nothing was heard of it for")) == (0, True)
    assert told["answers when it is back"] == [0]
    assert told["takes part when it is back"] == []


def test_no_process_is_left_and_what_nobody_knows_is_said(told):
    assert told["left"] == []
    assert told["unknown"] == [1]  # its actor was killed, and its agent ended unseen


def test_ray_prints_nothing_where_the_verdict_stands(told, folder):
    assert (folder / "output").read_text() == ""
