"""What the lowest lines of a terminal tell of the nodes of a run."""

from pytest_gpufleet.report.terminal.live import NodeNow, NodesNow, lines

CHECK = "acceptance/test_5_links.py::test_pairs"


def nodes(count: int, late: set[int]) -> NodesNow:
    return NodesNow(CHECK, [NodeNow(f"gf{n}", CHECK, "", n in late, 60.0 + n, 700.0) for n in range(count)])


def test_who_is_waited_for_is_named():
    assert lines(nodes(3, {1, 2}), 0) == [f"{CHECK}, waiting for gf1, gf2"]
    assert lines(nodes(500, {*range(10)}), 0)[0].endswith("gf0, gf1, gf2, gf3, gf4, gf5 and 4 more")
    assert lines(NodesNow("", []), 0) == ["no check is on"]


def test_a_row_a_node_those_that_are_waited_for_first():
    told = lines(nodes(3, {2}), 3)
    assert [line.split()[0] for line in told[1:]] == ["gf2", "gf0", "gf1"]
    assert told[1].split()[1:5] == ["62", "C", "700", "W"]


def test_of_many_nodes_as_many_as_there_is_room_for():
    told = lines(nodes(500, {400}), 20)
    assert len(told) == 21
    assert told[1].startswith("gf400")
    assert told[-1] == "and 481 more nodes, none not fine"


def test_nodes_that_are_not_fine_come_first():
    wrong = [NodeNow("gf7", "", "lost"), NodeNow("gf9", CHECK, "2 failed")]
    told = lines(NodesNow(CHECK, [*nodes(4, {1}).nodes, *wrong]), 4)
    assert [line.split()[0] for line in told[1:4]] == ["gf7", "gf9", "gf1"]
    assert told[4] == "and 3 more nodes, none not fine"
    assert lines(NodesNow(CHECK, wrong * 2), 2)[-1] == "and 3 more nodes, 3 of them not fine"


def test_what_nobody_has_told_is_left_empty():
    assert lines(NodesNow(CHECK, [NodeNow("gf1", "", "lost")]), 1)[1].split() == ["gf1", "lost"]
