"""NVLink domains: racks that are not here, of 18 trays with 4 GPUs each, and what is wrong with one of them."""

import random
from types import SimpleNamespace

import pytest

from pytest_gpufleet.machine import nvlink_domain
from pytest_gpufleet.machine.nvlink_domain import Tray, domain_faults, imex_faults
from pytest_gpufleet.machine.tools import Absent, Unreadable
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.model.metric import GiB, Measurement
from pytest_gpufleet.model.place import ClusterTopology, Domain, Pair, Place, grouped, joined
from pytest_gpufleet.probes.between_nodes import ROUNDS, meetings, mixed, squares
from pytest_gpufleet.probes.search.nodes import among_nodes, who_slows_nodes
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.orders import nodes_of_domain
from pytest_gpufleet.verdict.profile import for_gpu
from tests import runs

GB200, RACKS, TRAYS = "NVIDIA GB200", 28, 18
CLIQUE = 32766  # which racks have in common


def rack_of(node):
    return node // TRAYS


def cluster_uuid(rack):
    return f"{rack + 1:032x}"


def addresses(rack):
    return tuple(f"10.0.{rack}.{tray}" for tray in range(TRAYS))


def tray(rack, **facts):
    health = {"mask": 0, "clique": CLIQUE, "cluster": cluster_uuid(rack)}
    usual = {
        "compute_capability": [10, 0], "fabric": {"state": 3, "status": 0}, "fabric_health": health,
        "nvlink_states": [1] * 18,
    }  # fmt: skip
    return runs.topology(f"rack{rack}", GB200, **{**usual, **facts})


def trays(racks=RACKS, **other):
    found = {node: Tray(tray(rack_of(node)).domain, addresses(rack_of(node))) for node in range(racks * TRAYS)}
    return {**found, **{int(name[1:]): each for name, each in other.items()}}


def cluster(racks, trays_of=TRAYS):
    nodes = {node: tray(node // trays_of) for node in range(racks * trays_of)}
    found = joined(nodes, {node: f"r{node // trays_of}t{node % trays_of}" for node in nodes})
    assert isinstance(found, ClusterTopology)
    return found


@pytest.mark.parametrize(("facts", "inside"), [
    ({}, True),
    ({"name": "NVIDIA GB300"}, True),
    ({"name": "NVIDIA H100 80GB HBM3"}, False),  # with a UUID that other machines have too
    ({"fabric_health": {"mask": 0, "clique": 0, "cluster": "0" * 32}}, False),
    ({"fabric": {"state": 3, "status": 26}}, False),  # "Insufficient Resources" (Azure/azhpc-images issue 506)
    ({"fabric": {"state": 0, "status": 0}}, False),  # GB200 NVL4
])  # fmt: skip
def test_a_domain_is_a_cluster_and_a_clique_of_a_gpu_made_for_racks(facts, inside):
    assert tray(4, **facts).domain == (Domain(cluster_uuid(4), CLIQUE) if inside else None)


def test_racks_that_share_a_clique_are_two_domains():
    two = cluster(2, trays_of=3)
    pair, across = (Pair(Place(0, "node"), Place(node, "node")) for node in (2, 3))
    assert (two.kind(pair)[-1], two.kind(across)[-1]) == ("domain", "network")
    assert "of r1t0 (3 nodes)" in two.identity(Place(3, "domain"))


# ---------------------------------------------------------------- facts
def imex(root, answer, nodes, channels):
    for name, text in ((nvlink_domain.NODES_CONFIG, nodes), *((f"{nvlink_domain.CHANNELS}/channel{n}", "")
                                                               for n in range(channels))):  # fmt: skip
        if text or "channel" in name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def ended(*command, seconds=0):
        assert command == ("nvidia-imex-ctl", "-q")
        if answer is None:
            raise Unreadable("nvidia-imex-ctl is not installed")
        return answer

    return nvlink_domain.read(root, ended)


LIST = "# rack 7\n10.0.0.1\n10.0.0.2\n"


@pytest.mark.parametrize(("answer", "channels", "faults"), [
    ((0, "READY\n", ""), 1, []),
    ((0, "READY\n", ""), 0, ["imex_channel_missing"]),
    ((0, "WAITING_FOR_RECOVERY\n", ""), 1, []),  # of another tray
    ((0, "UNAVAILABLE\n", ""), 1, ["imex_down"]),
    ((1, "", "Error: failed to connect\n"), 1, ["imex_down"]),
    ((1, "", ""), 1, ["imex_down"]),
])  # fmt: skip
def test_imex_is_ready_with_channels(answer, channels, faults, tmp_path):
    found = imex(tmp_path, answer, LIST, channels)
    assert found.nodes == ("10.0.0.1", "10.0.0.2")
    assert [fault.name for fault in imex_faults(found)] == faults
    assert found.waits == found.daemon.startswith("WAITING")


@pytest.mark.parametrize(("answer", "nodes", "channels", "why"), [
    (None, "", 0, Absent),
    ((1, "", ""), "", 1, Unreadable),  # the daemon is another container's
    (None, LIST, 1, Unreadable),
])  # fmt: skip
def test_imex_that_is_not_here_or_cannot_be_asked(answer, nodes, channels, why, tmp_path):
    with pytest.raises(why):
        imex(tmp_path, answer, nodes, channels)


# ---------------------------------------------------------------- whole racks
STRAY = Tray(Domain("f" * 32, CLIQUE), addresses(5))
NODE = 5 * TRAYS + 7


@pytest.mark.parametrize("ordered", [0, TRAYS])
@pytest.mark.parametrize(("name", "other"), [
    ("", {}),
    ("nvlink_domain_split", {f"n{NODE}": STRAY}),
    ("nvlink_domain_split", {f"n{NODE}": Tray(None, addresses(5))}),
    ("nvlink_domain_split", {f"n{NODE}": Tray(tray(6).domain._replace(clique=1), addresses(5))}),
    ("imex_nodes_differ", {f"n{NODE}": Tray(tray(5).domain, addresses(5)[:-1])}),
    ("imex_nodes_differ", {f"n{NODE}": Tray(tray(5).domain, addresses(5)[::-1])}),
    ("", {f"n{NODE}": Tray(tray(5).domain)}),  # its list cannot be read
])  # fmt: skip
def test_of_28_healthy_racks_only_what_is_wrong_is_named(name, other, ordered):
    found = [(fault.name, fault.subjects) for fault in domain_faults(trays(**other), ordered)]
    assert found == ([(name, (Place(NODE, "node"),))] if name else [])


def test_a_domain_is_as_large_as_ordered():
    there = trays(3)
    del there[TRAYS + 3]
    assert domain_faults(there) == []
    (fault,) = domain_faults(there, TRAYS)
    assert (fault.name, fault.subjects) == ("nvlink_domain_incomplete", (Place(TRAYS, "domain"),))
    without_lists = {node: Tray(each.domain) for node, each in trays(3, n30=STRAY).items()}
    assert [fault.subjects for fault in domain_faults(without_lists, TRAYS)] == [(Place(30, "node"),)]
    assert domain_faults(without_lists) == []  # nobody says that it belongs to them


def test_part_of_a_rack_is_no_fault_where_nobody_ordered_more():
    some = {node: each for node, each in trays(2).items() if node < 22}
    one_list = {node: Tray(each.domain, ("10.0.0.1", "10.0.0.2")) for node, each in trays(2).items()}
    assert domain_faults(some) == domain_faults(one_list) == []


@pytest.mark.parametrize(("nodes", "size"), [(18, 18), ({"at_least": 16}, 16), (None, 0)])
def test_an_order_says_how_many_nodes_a_domain_has(nodes, size):
    assert nodes_of_domain(Order("o.toml", "", {"domain": {"nodes": nodes}} if nodes else {"name": "x"})) == size
    assert nodes_of_domain(None) == 0


# ---------------------------------------------------------------- figures between nodes
INSIDE, ACROSS, RAIL = 811.0, 190.0, 48.0  # GB/s of healthy ones
DOMAINS = [[*range(rack * TRAYS, (rack + 1) * TRAYS)] for rack in range(RACKS)]
NODES = [*range(RACKS * TRAYS)]
HOSTS = {node: f"r{rack_of(node)}t{node % TRAYS}" for node in NODES}


def reached(slow=lambda a, b: 1.0, seed=7):
    dice = random.Random(seed)

    def measure(pairs):
        usual = (INSIDE if rack_of(a) == rack_of(b) else ACROSS for a, *_, b in pairs)
        return [each * slow(p[0], p[-1]) * dice.gauss(1, 0.01) for p, each in zip(pairs, usual, strict=True)]

    return measure


def test_pairs_meet_inside_every_domain_and_across():
    rounds = meetings(NODES, DOMAINS, seed=16)
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    partners = grouped((node, pair) for pairs in rounds for pair in pairs for node in pair)
    assert {*[sum(rack_of(a) == rack_of(b) for a, b in partners[node]) for node in NODES]} == {ROUNDS}
    assert min(len(partners[node]) for node in NODES) >= ROUNDS + 4
    assert meetings(NODES[:TRAYS], DOMAINS[:1], 16) == meetings(NODES[:TRAYS], [], 16)  # nothing is across
    groups = squares(mixed(NODES, DOMAINS))[0]
    assert {len({*map(rack_of, group)}) for group in groups} == {len(groups[0])}


def findings(slow, rails=()):
    """All pairs of a run on 28 racks, and their rails without NVLink, as they are judged."""
    measure, topology, profile = reached(slow), cluster(RACKS), for_gpu(GB200)
    pairs = [pair for each in meetings(NODES, DOMAINS, 16) for pair in each]
    figures = dict(zip(pairs, measure(pairs), strict=True))
    found = []
    for name in ("inside", "across"):
        values = {
            Pair(Place(a, "node"), Place(b, "node")): figure
            for (a, b), figure in figures.items()
            if (rack_of(a) == rack_of(b)) == (name == "inside")
        }
        under = {"collective": "all_reduce", "bytes": 8 * GiB, "ranks": 8, "nodes": 2, "domain": name}
        found.append(Measurement("node_group_busbw", values, under))
    dice = random.Random(3)
    of_rails = {Place(node, "rail", rail): RAIL * dice.gauss(1, 0.01) for node in NODES for rail in range(4)}
    found.append(Measurement("rail_bandwidth", of_rails | dict(rails), {"at_once": "all", "bytes": GiB}))
    how = {"rehearsal": False, "required": False, "network": 400}
    return [judge(each, profile, topology, "a", **how) for each in found]


def blamed(finding):
    return {str(place) for place in (*finding.missed, *(finding.slower_than_peers or ()))}


def searched(slow):
    _, faults = among_nodes(NODES, DOMAINS, reached(slow), {}, HOSTS)
    return [(fault.name, " ".join(map(str, fault.subjects))) for fault in faults]


def test_28_healthy_racks_meet_each_other_and_a_dead_adapter_shows_on_its_rail_alone():
    """All inside a domain are four times as fast as across."""
    assert [(each.state, blamed(each)) for each in findings(lambda a, b: 1.0)] == [
        ("for information", set()), ("for information", set()), ("met", set()),
    ]  # fmt: skip
    assert searched(lambda a, b: 1.0) == []
    dead = Place(NODE, "rail", 2)
    assert [blamed(each) for each in findings(lambda a, b: 1.0, {dead: 0.3})] == [set(), set(), {str(dead)}]


def test_trays_with_fewer_gpus_make_no_domain_slow():
    sizes = [*[4] * 28, *[2] * 8]
    places = [Place(node, "gpu", index) for node, size in enumerate(sizes) for index in range(size)]
    world = SimpleNamespace(
        places=places,
        gpus=[SimpleNamespace(domain=f"rack {rack_of(place.node)}") for place in places],
        hosts=HOSTS,
        each=lambda groups, *how, **more: [[SimpleNamespace(value=10.0 * len(ranks))] for ranks in groups],
    )
    (fault,) = who_slows_nodes(world, [], GiB)
    assert (fault.name, fault.subjects) == ("network_between_nodes_slow", ())


OF_NODE, OF_DOMAIN = f"node{NODE}", {f"node{node}" for node in DOMAINS[5]}


# What is left of the links in a rack that lost NVLink switches, of the NVLinks of one node, and of its uplink.
@pytest.mark.parametrize(("left", "of_node", "inside", "population", "names", "fault"), [
    (0.75, False, True, 0, OF_DOMAIN, ("nvlink_domain_slow", f"node{DOMAINS[5][0]}/domain0")),
    (0.7, True, True, 0, {OF_NODE}, ("node_slow", OF_NODE)),
    (0.5, True, False, 1, {OF_NODE}, ("node_slow", OF_NODE)),
], ids=["rack", "cables", "uplink"])  # fmt: skip
def test_of_28_racks_the_slow_domain_or_node_is_named(left, of_node, inside, population, names, fault):
    def slow(a, b):
        here = NODE in (a, b) if of_node else rack_of(a) == 5
        return left if here and (rack_of(a) == rack_of(b)) == inside else 1.0

    missed = [blamed(each) for each in findings(slow)]
    assert all(names & {*pair.split("-")} for pair in missed[population])
    assert [index for index, pairs in enumerate(missed) if pairs] == [population]
    assert searched(slow) == [fault]


def test_where_few_met_across_more_pairs_are_measured_across():
    """The uplink of node 7 is slow, and each node has met one of the other domain."""
    nodes, domains = NODES[: 2 * TRAYS], DOMAINS[:2]
    measure = reached(lambda a, b: 0.5 if 7 in (a, b) and rack_of(a) != rack_of(b) else 1.0)
    met = [pair for pairs in meetings(nodes, domains, 0)[: ROUNDS + 1] for pair in pairs]
    _, faults = among_nodes(nodes, domains, measure, dict(zip(met, measure(met), strict=True)), HOSTS)
    assert [(fault.name, fault.subjects) for fault in faults] == [("node_slow", (Place(7, "node"),))]


@pytest.mark.parametrize(("nodes", "domain", "value", "state", "grade"), [
    (18, "inside", 834.6, "met", "published"),
    (18, "inside", 700.0, "missed", "published"),
    (12, "inside", 500.0, "missed", "physical"),
    (36, "across", 792.0, "met", "published"),
    (36, "across", 640.0, "missed", "published"),
    (72, "across", 500.0, "met", "physical"),
])  # fmt: skip
def test_collectives_over_nvlink_are_not_held_against_the_network(nodes, domain, value, state, grade):
    """Nor against what one domain reaches, where it is more than one."""
    under = {"collective": "all_reduce", "bytes": 8 * GiB, "dtype": "float32", "ranks": 4 * nodes, "nodes": nodes}
    measured = Measurement("busbw", {"world": value}, {**under, "domain": domain})
    how = {"rehearsal": False, "required": False, "measured": [measured]}
    finding = judge(measured, for_gpu(GB200), cluster(4), "a", network=400, **how)
    assert (finding.state, finding.limit and finding.limit.grade) == (state, grade)
    unknown = judge(measured, for_gpu(GB200), cluster(4), "a", network=0, **how)  # of no port is known what it can do
    assert unknown.state == (state if domain == "inside" else "not judged")
