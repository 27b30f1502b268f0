"""What can happen to a node while a run goes on, done to hosts that are separate for all that a run can see, started by
srun and by Ray: each is named, costs one check at most, and leaves nothing running anywhere."""

import shutil
import signal
import time

import pytest

from pytest_gpufleet.model.place import Pair, Place
from tests.conftest import ACCEPTANCE, ROOT
from tests.nodes.hosts import hosts, possible, until
from tests.nodes.rehearsals import AGENT, PATIENCE_SECONDS, PORT, RAYLET, SECRET, RayCluster, Srun, has_raylet

OUT_SECONDS = 5.0  # that a cable may be out
FROZEN_SECONDS = 15.0
ALONE_SECONDS = 90.0  # an agent alone ends after 30, and this machine may be busy
SOON = "--fleet-join=20s"
# A clock that is two seconds ahead, for all Python on a host: namespaces have no clock of their own.
SHIFTED = """
import time

genuine = time.time
time.time = lambda: genuine() + 2.0
"""


def some_hosts(tmp_path_factory, count, **more):
    if why := possible():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    return hosts(count, folder, **more), folder


@pytest.fixture(scope="module")
def srun_hosts(tmp_path_factory):
    """Three hosts. Tests leave them as they found them, but for the last one."""
    made, folder = some_hosts(tmp_path_factory, 3)
    with made as them:
        yield Srun(them, folder)


@pytest.fixture(scope="module")
def ray_hosts(tmp_path_factory):
    """Three more, with Ray on them."""
    pytest.importorskip("ray", reason="Ray is not installed")
    made, folder = some_hosts(tmp_path_factory, 3)
    with made as them:
        yield RayCluster(them, folder)


def clean_up(launcher):
    try:
        nothing_runs(launcher)
    finally:
        launcher.end_run()
        for host in launcher.hosts:
            host.mend()


@pytest.fixture
def srun(srun_hosts):
    yield srun_hosts
    clean_up(srun_hosts)


@pytest.fixture
def ray(ray_hosts):
    ray_hosts.start()
    yield ray_hosts
    clean_up(ray_hosts)


@pytest.fixture(params=["srun", "ray"])
def launcher(request):
    return request.getfixturevalue(request.param)


def nothing_runs(launcher, seconds=PATIENCE_SECONDS):
    for host in launcher.hosts:
        until(f"nothing of a run is on {host.name}", lambda host=host: not launcher.left(host), seconds)


def lost(ended):
    """The hosts that were lost, and at which check each."""
    at = {fault.subjects[0].node: fault.check for fault in ended.record.faults if fault.name == "node_lost"}
    assert at.keys() == ended.record.lost.keys()
    return {ended.record.hosts[node]: check.partition("::test_")[2] for node, check in at.items()}


def failed(ended):
    fine = ("passed", "not applicable")
    return {name.removeprefix("test_") for name, outcome in ended.outcomes.items() if outcome not in fine}


def assert_lost(ended, hosts):
    """That these hosts were lost, each at one check, that this check failed and no other did, and that all that names
    them does so."""
    assert (ended.status, lost(ended)) == (1, hosts), ended.text
    assert failed(ended) == {*hosts.values()} - {""}, ended.text
    assert all(host in ended.text and any(host in why for why in ended.record.reasons) for host in hosts), ended.text


def assert_all_well(run):
    ended = run.end()
    assert (ended.status, set(ended.outcomes.values()), lost(ended)) == (0, {"passed"}, {}), ended.text
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]
    assert {task.wait(PATIENCE_SECONDS) for task in run.tasks} == {0}
    assert {run.says(host) for host in run.hosts[1 : len(run.tasks)]} <= {""}


def held_together(launcher, **more):
    run = launcher.rehearse("then", "together", "last", held=["together"], **more)
    run.at("together", *launcher.hosts, ranks=2)
    return run


def test_healthy_nodes_lose_nothing_and_the_others_say_nothing(launcher):
    run = launcher.rehearse("alone", "alone_on_ranks", "then", "together", "last")
    assert_all_well(run)
    record = run.end().record
    secured = "secret" if isinstance(launcher, Srun) else "token"
    assert (record.run.transport, record.run.secured, record.run.nodes_wanted) == (launcher.name, secured, 3)


def test_a_cable_that_is_out_for_five_seconds_twice_costs_nothing(launcher):
    _, second, _ = launcher.hosts
    run = held_together(launcher)
    for _ in range(2):
        second.pull_cable()
        time.sleep(OUT_SECONDS)
        second.put_cable_back()
        time.sleep(OUT_SECONDS)
    run.go("together")
    assert_all_well(run)


@pytest.mark.parametrize("way", ["cable", "one direction"])
def test_a_node_that_cannot_be_heard_or_hear_is_lost_and_ends_by_itself(launcher, way):
    first, _, third = launcher.hosts
    run = held_together(launcher)
    began = time.time()
    if way == "cable":
        third.pull_cable()
    else:
        first.do_not_send_to(third)
    ended = run.end()
    assert_lost(ended, {"gf2": "together"})
    assert run.who == ["gf0", "gf0", "gf1", "gf1"]
    assert ended.record.lost[2].t.seconds - began > OUT_SECONDS
    nothing_runs(launcher, ALONE_SECONDS)  # nobody could tell gf2 to end
    assert len(run.tasks) == 1 or "nothing was heard" in run.says(third)


def test_two_nodes_that_are_cut_off_from_each_other_are_named(launcher):
    """Each of them reaches the head, and the head reaches both."""
    _, second, third = launcher.hosts
    run = held_together(launcher, options=["--fleet-timeout=20"])
    second.do_not_send_to(third)
    third.do_not_send_to(second)
    ended = run.end()
    found = [(fault.name, fault.subjects) for fault in ended.record.faults]
    assert found == [("nodes_cut_off", (Pair(Place(1, "node"), Place(2, "node")),))], ended.text
    assert (ended.status, lost(ended), failed(ended)) == (1, {}, {"together"}), ended.text
    assert run.who == ["gf0", "gf0", "gf1", "gf1"]


def test_a_frozen_node_is_lost_and_does_not_come_back(launcher):
    _, second, _ = launcher.hosts
    run = launcher.rehearse("then", "together", "later", "last", held=["together", "later"])
    run.at("together", *launcher.hosts, ranks=2)
    second.signal(signal.SIGSTOP)
    time.sleep(FROZEN_SECONDS)
    run.at("later", launcher.hosts[0], launcher.hosts[2], ranks=2)
    second.signal(signal.SIGCONT)
    until("its ranks have ended", lambda: len(launcher.left(second)) <= 5, PATIENCE_SECONDS)
    run.go("later")
    ended = run.end()
    assert_lost(ended, {"gf1": "together"})
    assert run.who == ["gf0", "gf0", "gf2", "gf2"]
    assert ended.record.finished[1].sha256


@pytest.mark.parametrize("who", [0, 2], ids=["head", "other"])
def test_an_agent_is_killed_and_costs_its_node_and_one_check(launcher, who):
    run = held_together(launcher)
    assert launcher.hosts[who].signal(signal.SIGKILL, AGENT)
    assert_lost(run.end(), {f"gf{who}": "together"})
    assert set(run.who) == {"gf0", "gf1", "gf2"} - {f"gf{who}"}


def test_ranks_are_killed_and_cost_one_check(launcher):
    _, _, third = launcher.hosts
    run = held_together(launcher)
    for rank in [int(path.name.split()[-1]) for path in (run.shared / "at").glob("together gf2 *")]:
        third.do("kill", "-KILL", rank)
    ended = run.end()
    assert (ended.status, lost(ended), failed(ended)) == (1, {}, {"together"}), ended.text
    assert {place.node for fault in ended.record.faults for place in fault.subjects} == {2}
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]


def test_the_launchers_daemon_is_killed_and_the_run_goes_on(srun):
    """Of the head, and of another node: what has started a task there."""
    run = held_together(srun)
    for host in srun.hosts[::2]:
        assert host.signal(signal.SIGKILL, "sh -c", "exit $?")
    run.go("together")
    report = run.folder / "runs"
    until("the report is there", lambda: [*report.glob("*/summary.json")], PATIENCE_SECONDS)
    assert run.who == ["gf0", "gf0", "gf1", "gf1", "gf2", "gf2"]


def test_a_run_survives_all_of_ray(ray):
    run = held_together(ray)
    for host in ray.hosts:
        assert host.signal(signal.SIGKILL, RAYLET)
    until("Ray is gone", lambda: not any(map(has_raylet, ray.hosts)), PATIENCE_SECONDS)
    run.go("together")
    assert_all_well(run)
    assert "INFO worker.py" not in run.text  # which Ray prints, where it may


def test_the_own_run_of_a_node_is_killed(launcher):
    _, second, _ = launcher.hosts
    run = launcher.rehearse("alone", "then", "last", held=["alone"])
    run.at("alone", *launcher.hosts)
    assert second.signal(signal.SIGKILL, "-m pytest", "addopts=")
    run.go("alone")
    ended = run.end()
    found = [(fault.name, fault.subjects[0].node) for fault in ended.record.faults]
    assert (ended.status, found, failed(ended)) == (10, [("node_unfit", 1)], set()), ended.text
    assert run.who == ["gf0", "gf0", "gf2", "gf2"]


def test_the_own_run_of_a_node_hangs_and_the_others_go_on(launcher):
    _, second, _ = launcher.hosts
    run = launcher.rehearse("alone", "then", "last", held=["alone"], options=["--fleet-hung=10s"])
    run.at("alone", *launcher.hosts)
    assert second.signal(signal.SIGSTOP, "-m pytest", "addopts=")
    run.go("alone")
    ended = run.end()
    (fault,) = ended.record.faults
    assert (fault.name, fault.subjects[0].node, "test_alone" in fault.what) == ("node_hung", 1, True), ended.text
    assert (failed(ended), run.who) == (set(), ["gf0", "gf0", "gf2", "gf2"])


def test_the_disk_of_a_node_is_full(launcher):
    """Its ranks have no place. Its own run needs little: whether it comes to its end is up to a last page."""
    _, second, _ = launcher.hosts
    second.do("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", second.temporary)
    run = launcher.rehearse("alone", "then", "last", held=["alone"])
    run.at("alone", *launcher.hosts)
    second.fill_disk()
    run.go("alone")
    ended = run.end()
    found = {(fault.subjects[0].node, "the disk is full" in fault.what) for fault in ended.record.faults}
    assert found == {(1, True)}, ended.text
    assert {fault.name for fault in ended.record.faults} <= {"rank_died", "node_unfit"}


def test_who_has_another_secret_is_told_by_address_and_says_so_itself(srun):
    _, _, third = srun.hosts
    run = srun.rehearse("then", "last", of_host={"gf2": {"GPUFLEET_SECRET": SECRET[::-1]}}, options=[SOON])
    ended = run.end()
    (fault,) = ended.record.faults
    assert (ended.status, fault.name) == (1, "node_missing"), ended.text
    assert all(word in fault.what for word in ("gf2", "another secret", third.addresses[0]))
    assert run.tasks[2].wait(60.0) == 0
    assert "has another secret" in run.says(third)


def test_another_token_of_ray_is_described_in_one_sentence(ray):
    ended = ray.rehearse("then", environment={"RAY_AUTH_TOKEN": "0" * 48}).end()
    assert (ended.status, ended.folders) == (4, []), ended.text
    (line,) = filter(None, ended.text.splitlines())
    assert "asks for a token" in line


def test_a_node_that_does_not_come_and_one_that_cannot_reach_the_head_have_names(srun):
    first, second, third = srun.hosts
    third.do_not_send_to(first, str(PORT))
    run = srun.rehearse("then", absent=[second], options=[SOON])
    ended = run.end()
    (fault,) = ended.record.faults
    assert (ended.status, fault.name) == (1, "node_missing"), ended.text
    assert "gf1, gf2" in fault.what
    assert run.tasks[1].wait(60.0) == 0
    assert f"nothing listens at gf0:{PORT}" in run.says(third)


# ---------------------------------------------------------------- who is cut off from whom
REACH = f"{ACCEPTANCE}/test_nodes_2_reach.py"


def test_two_nodes_that_cannot_reach_each_other_are_named_before_they_hang(srun):
    _, second, third = srun.hosts
    second.do_not_send_to(third)
    run = srun.rehearse("then", REACH, "last")
    ended = run.end()
    (fault,) = ended.record.faults
    assert (ended.status, fault.name) == (1, "nodes_cut_off"), ended.text
    assert fault.subjects == (Pair(Place(1, "node"), Place(2, "node")),)
    assert f"of {second.addresses[0]} (rail0)" in fault.what
    assert (failed(ended), run.who) == ({"nodes_reach_each_other"}, ["gf0", "gf0", "gf1", "gf1"])


# ---------------------------------------------------------------- nodes that differ
def test_a_node_with_other_files_of_the_package_is_refused(srun, tmp_path):
    package = ROOT / "src" / "pytest_gpufleet"
    other = shutil.copytree(package, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "__init__.py").open("a") as file:
        file.write("# changed\n")
    second = srun.hosts[1]
    second.put_over(package, other)
    ended = srun.rehearse("then").end()
    assert (ended.status, ended.folders) == (4, []), ended.text
    assert "gf1: other files of pytest-gpufleet" in ended.text
    assert "gf2" not in ended.text
    second.take_off(package)


def test_another_environment_and_another_clock_are_named(srun, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)  # which Python imports when it starts
    of_host = {"gf1": {"NCCL_ALGO": "Ring"}, "gf2": {"PYTHONPATH": str(tmp_path)}}
    ended = srun.rehearse("then", f"{ACCEPTANCE}/test_nodes_1_alike.py", "last", of_host=of_host).end()
    found = {(fault.name, ended.record.hosts[fault.subjects[0].node]): fault.what for fault in ended.record.faults}
    assert (ended.status, found.keys()) == (1, {("host_unlike_others", "gf1"), ("clock_skew", "gf2")}), ended.text
    assert "NCCL_ALGO" in found["host_unlike_others", "gf1"]
    assert failed(ended) == {"nodes_are_alike", "clocks_agree"}


def test_nothing_runs_when_the_controller_was_killed(srun):
    run = srun.rehearse("alone_on_ranks", held=["alone on ranks"])
    run.at("alone on ranks", *srun.hosts, ranks=2)
    srun.hosts[0].signal(signal.SIGKILL, "--nodes=3")
    nothing_runs(srun, ALONE_SECONDS)


def test_the_head_without_power_takes_the_run_with_it_and_nothing_else_stays(srun):
    run = srun.rehearse("together", held=["together"])
    run.at("together", *srun.hosts, ranks=2)
    srun.hosts[0].space.end()
    nothing_runs(srun, ALONE_SECONDS)


# ---------------------------------------------------------------- slow cables, with a network for each rail
# Slower than what processes of one machine reach, however busy it is: else its processors would be measured.
MEGABITS, SLOW_MEGABITS = 100, 20
RAILS = (0, 1)


@pytest.fixture(scope="module")
def railed(tmp_path_factory):
    """Four hosts with a network for each of the two ranks that each has."""
    made, folder = some_hosts(tmp_path_factory, 4, rails=len(RAILS))
    with made as them:
        for host in them:
            for rail in RAILS:
                host.slow(MEGABITS, rail)
        yield Srun(them, folder)


def test_a_slow_rail_and_a_slow_node_are_named(railed):
    _, second, third, _ = railed.hosts
    third.slow(SLOW_MEGABITS, rail=1)
    of_host = {host.name: {"GLOO_SOCKET_IFNAME": "rail0,rail1"} for host in railed.hosts}
    run = railed.rehearse("then", "rails", "pairs", held=["pairs"], of_host=of_host)
    run.at("pairs", *railed.hosts, ranks=2)
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
