"""Slow cables between hosts that are separate, with a network for each rail: the node or the rail is named."""

import pytest

from pytest_gpufleet.model.place import Place
from tests.nodes.hosts import hosts, possible
from tests.nodes.rehearsals import Srun

# Slower than what processes of one machine reach, however busy it is: else its processors would be measured.
MEGABITS, SLOW_MEGABITS = 100, 20
RAILS = (0, 1)


@pytest.fixture(scope="module")
def srun(tmp_path_factory):
    """Four hosts with a network for each of the two ranks that each has."""
    if why := possible():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(4, folder, rails=len(RAILS)) as made:
        for host in made:
            for rail in RAILS:
                host.slow(MEGABITS, rail)
        yield Srun(made, folder)


def test_a_slow_rail_and_a_slow_node_are_named(srun):
    _, second, third, _ = srun.hosts
    third.slow(SLOW_MEGABITS, rail=1)
    of_host = {host.name: {"GLOO_SOCKET_IFNAME": "rail0,rail1"} for host in srun.hosts}
    run = srun.rehearse("then", "rails", "pairs", held=["pairs"], of_host=of_host)
    run.at("pairs", *srun.hosts, ranks=2)
    third.slow(MEGABITS, rail=1)
    for rail in RAILS:
        second.slow(SLOW_MEGABITS, rail)
    run.go("pairs")
    ended = run.end()
    found = [(fault.check.partition("::test_")[2], fault.name, fault.subjects) for fault in ended.record.faults]
    assert found == [("rails", "rail_slow", (Place(2, "rail", 1),)), ("pairs", "node_slow", (Place(1, "node"),))], (
        ended.text
    )
    assert ended.status == 1
    assert "gf2 rail 1" in ended.text
    assert "gf1" in ended.text
