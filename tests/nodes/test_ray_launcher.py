"""Ray starts an agent on each of its nodes, and what becomes of Ray then is nobody's concern."""

import signal
from collections.abc import Iterator

import pytest

from tests.nodes.hosts import hosts, possible, until
from tests.nodes.rehearsals import PATIENCE_SECONDS, RAYLET, RayCluster, has_raylet

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three hosts with Ray on them. The last test ends it."""
    if why := possible():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(3, folder) as made:
        cluster = RayCluster(made, folder)
        cluster.start()
        yield cluster


@pytest.fixture(autouse=True)
def left(cluster: RayCluster) -> Iterator[None]:
    yield
    cluster.end_run()


def nothing_runs(cluster: RayCluster) -> None:
    for host in cluster.hosts:
        until(f"nothing of a run is on {host.name}", lambda host=host: not cluster.left(host), PATIENCE_SECONDS)


def test_healthy_nodes_by_ray(cluster: RayCluster) -> None:
    run = cluster.rehearse("alone", "then", "together", "last")
    ended = run.end()
    assert (ended.status, set(ended.outcomes.values())) == (0, {"passed"}), ended.text
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]
    assert (ended.record.run.secured, ended.record.run.transport) == ("token", "ray")
    assert "INFO worker.py" not in ended.text  # which Ray prints, where it may
    nothing_runs(cluster)


def test_another_token_is_described_in_one_sentence(cluster: RayCluster) -> None:
    ended = cluster.rehearse("then", environment={"RAY_AUTH_TOKEN": "0" * 48}).end()
    assert (ended.status, ended.folders) == (4, []), ended.text
    (line,) = filter(None, ended.text.splitlines())
    assert "asks for a token" in line


def test_a_run_survives_all_of_ray(cluster: RayCluster) -> None:
    run = cluster.rehearse("then", "together", "last", held=["together"])
    run.at("together", *cluster.hosts, ranks=2)
    for host in cluster.hosts:
        assert host.signal(signal.SIGKILL, RAYLET)
    until("Ray is gone", lambda: not any(map(has_raylet, cluster.hosts)), PATIENCE_SECONDS)
    run.go("together")
    ended = run.end()
    assert (ended.status, set(ended.outcomes.values())) == (0, {"passed"}), ended.text
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]
    nothing_runs(cluster)
