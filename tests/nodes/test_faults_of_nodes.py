"""What can happen to a node while a run goes on, done to hosts that are separate for all that a run can see: each is
named, costs one check at most, and leaves nothing running anywhere."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ACCEPTANCE, ROOT, FleetRun
from tests.nodes.hosts import hosts, possible, until
from tests.nodes.ray_on_hosts import AGENT, PATIENCE_SECONDS, RAYLET, RELAY, RayCluster, of_a_run

pytest.importorskip("ray", reason="Ray is not installed")

OUT_SECONDS = 5.0  # that a cable may be out
ALONE_SECONDS = 60.0  # an agent alone ends after 30, and this machine may be busy
# A clock that is two seconds ahead, for all Python on a host: namespaces have no clock of their own.
SHIFTED = """
import time

genuine = time.time
time.time = lambda: genuine() + 2.0
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three hosts. Tests leave it as they found it, but for the last one."""
    if why := possible():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(3, folder) as made:
        cluster = RayCluster(made, folder)
        cluster.start(made)
        yield cluster


@pytest.fixture(autouse=True)
def left(cluster: RayCluster) -> Iterator[None]:
    yield
    cluster.end_run()


def nothing_runs(cluster: RayCluster, seconds: float = PATIENCE_SECONDS) -> None:
    for host in cluster.hosts:
        until(f"nothing of a run is on {host.name}", lambda host=host: not of_a_run(host), seconds)


def lost(ended: FleetRun) -> dict[str, str]:
    """The hosts that were lost, and at which check each."""
    at = {fault.subjects[0].node: fault.check for fault in ended.record.faults if fault.name == "node_lost"}
    assert at.keys() == ended.record.lost.keys()
    return {ended.record.hosts[node]: check.partition("::test_")[2] for node, check in at.items()}


def failed(ended: FleetRun) -> set[str]:
    """The checks that apply and did not pass."""
    fine = ("passed", "not applicable")
    return {name.removeprefix("test_") for name, outcome in ended.outcomes.items() if outcome not in fine}


def assert_lost(ended: FleetRun, hosts: dict[str, str]) -> None:
    """That these hosts were lost, each at one check, that this check failed and no other did, and that all that names
    them does so."""
    assert (ended.status, lost(ended)) == (1, hosts), ended.text
    assert failed(ended) == {*hosts.values()}, ended.text
    assert all(host in ended.text and any(host in why for why in ended.record.reasons) for host in hosts), ended.text


def test_healthy_nodes_lose_nothing(cluster: RayCluster) -> None:
    run = cluster.rehearse("alone", "alone_on_ranks", "then", "together", "last")
    ended = run.end()
    assert (ended.status, set(ended.outcomes.values())) == (0, {"passed"}), ended.text
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]
    assert ended.record.run.secured == "token"
    assert "INFO worker.py" not in ended.text  # which Ray prints, where it may
    nothing_runs(cluster)


def test_a_cable_that_is_out_for_five_seconds_costs_nothing(cluster: RayCluster) -> None:
    _, second, _ = cluster.hosts
    run = cluster.rehearse("then", "together", "last", held=["together"])
    run.at("together", *cluster.hosts, ranks=2)
    second.pull_cable()
    time.sleep(OUT_SECONDS)
    second.put_cable_back()
    run.go("together")
    ended = run.end()
    assert (ended.status, set(ended.outcomes.values()), lost(ended)) == (0, {"passed"}, {}), ended.text
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]
    nothing_runs(cluster)


def test_a_node_whose_cable_is_out_is_lost_and_ends_by_itself(cluster: RayCluster) -> None:
    _, _, third = cluster.hosts
    run = cluster.rehearse("then", "together", "last", held=["together"])
    run.at("together", *cluster.hosts, ranks=2)
    began = time.time()
    third.pull_cable()
    ended = run.end()
    assert_lost(ended, {"gf2": "together"})
    assert run.who == ["gf0", "gf0", "gf1", "gf1"]
    assert ended.record.lost[2].seconds - began > OUT_SECONDS
    nothing_runs(cluster)  # nobody could tell gf2 to end
    third.put_cable_back()
    cluster.stop(third)  # which Ray may take for dead by then


def test_a_frozen_node_is_lost_and_does_not_come_back(cluster: RayCluster) -> None:
    _, second, _ = cluster.hosts
    run = cluster.rehearse("then", "together", "later", "last", held=["together", "later"])
    run.at("together", *cluster.hosts, ranks=2)
    second.signal(signal.SIGSTOP)
    run.at("later", cluster.hosts[0], cluster.hosts[2], ranks=2)
    second.signal(signal.SIGCONT)
    until("its ranks have ended", lambda: len(of_a_run(second)) <= 3, PATIENCE_SECONDS)
    run.go("later")
    ended = run.end()
    assert_lost(ended, {"gf1": "together"})
    assert run.who == ["gf0", "gf0", "gf2", "gf2"]
    assert ended.record.finished[1].sha256
    nothing_runs(cluster)


@pytest.mark.parametrize("process", [AGENT, RAYLET, RELAY], ids=["agent", "raylet", "actor"])
def test_an_agent_or_what_carries_it_is_killed_and_costs_its_node_and_one_check(
    cluster: RayCluster, process: str
) -> None:
    _, _, third = cluster.hosts
    run = cluster.rehearse("then", "together", "last", held=["together"])
    run.at("together", *cluster.hosts, ranks=2)
    assert third.signal(signal.SIGKILL, process)
    ended = run.end()
    assert_lost(ended, {"gf2": "together"})
    assert run.who == ["gf0", "gf0", "gf1", "gf1"]
    nothing_runs(cluster)
    cluster.stop(third)


# ---------------------------------------------------------------- nodes that differ


def test_a_node_with_other_files_of_the_package_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    package = ROOT / "src" / "pytest_gpufleet"
    other = shutil.copytree(package, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "__init__.py").open("a") as file:
        file.write("# changed\n")
    second = cluster.hosts[1]
    second.put_over(package, other)
    ended = cluster.rehearse("then").end()
    second.take_off(package)
    assert (ended.status, ended.folders) == (4, []), ended.text
    assert "gf1: other files of pytest-gpufleet" in ended.text
    assert "gf2" not in ended.text
    nothing_runs(cluster)


def test_another_environment_and_another_clock_are_named(cluster: RayCluster, tmp_path: Path) -> None:
    _, second, third = cluster.hosts
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)  # which Python imports when it starts
    cluster.start([second, third], {"gf1": {"NCCL_ALGO": "Ring"}, "gf2": {"PYTHONPATH": str(tmp_path)}})
    ended = cluster.rehearse("then", f"{ACCEPTANCE}/test_nodes_1_alike.py", "last").end()
    found = {(fault.name, ended.record.hosts[fault.subjects[0].node]): fault.what for fault in ended.record.faults}
    assert (ended.status, found.keys()) == (1, {("host_unlike_others", "gf1"), ("clock_skew", "gf2")}), ended.text
    assert "NCCL_ALGO" in found["host_unlike_others", "gf1"]
    assert failed(ended) == {"nodes_are_alike", "clocks_agree"}
    nothing_runs(cluster)
    cluster.stop(second)
    cluster.stop(third)


def test_another_token_is_told_in_one_sentence(cluster: RayCluster) -> None:
    ended = cluster.rehearse("then", environment={"RAY_AUTH_TOKEN": "0" * 48}).end()
    assert (ended.status, ended.folders) == (4, []), ended.text
    (line,) = filter(None, ended.text.splitlines())
    assert "asks for a token" in line


def test_nothing_runs_when_the_controller_was_killed(cluster: RayCluster) -> None:
    run = cluster.rehearse("alone_on_ranks", held=["alone on ranks"])
    run.at("alone on ranks", *cluster.hosts, ranks=2)
    cluster.hosts[0].signal(signal.SIGKILL, "--nodes=3")
    nothing_runs(cluster, ALONE_SECONDS)


def test_the_head_without_power_takes_the_run_with_it_and_nothing_else_stays(cluster: RayCluster) -> None:
    run = cluster.rehearse("together", held=["together"])
    run.at("together", *cluster.hosts, ranks=2)
    cluster.hosts[0].space.end()
    nothing_runs(cluster, ALONE_SECONDS)
