"""Starts, deadlines, grace, kills and groups, on an engine without processes."""

import json
import pickle
import threading
from dataclasses import replace

import pytest

from pytest_gpufleet import RankFailure, RankReport
from pytest_gpufleet.model.events import WorldStarted
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.world import call, world as pool_module
from pytest_gpufleet.world.call import Outcome, Trace
from pytest_gpufleet.world.engines.processes import CANNOT_ANSWER
from pytest_gpufleet.world.failure import MAX_FAILED_STARTS
from pytest_gpufleet.world.world import GRACE_SECONDS

from .fake_engine import Dies, FakeEngine, Hangs, Sends, Takes, specs, world_of


@pytest.fixture
def engine():
    return FakeEngine()


def flight(number):
    """As torch's flight recorder has a rank that has come to this collective."""
    entries = [{"profiling_name": "gloo:all_reduce", "state": "started", "collective_seq_id": number}]
    return json.dumps({"entries": entries})


def ends_of(failure):
    """Of each rank, the one to blame first, how it ended."""
    return [(report.rank, report.state) for report in failure.value.reports]


@pytest.mark.parametrize(("of_call", "seconds"), [(None, 10.0), (1.25, 1.25)])
def test_a_deadline_ends_a_hang_and_names_the_rank(engine, of_call, seconds):
    world = world_of(engine, 2)
    with pytest.raises(RankFailure) as failure:
        world.run(lambda rank: Hangs() if rank.index else None, timeout=of_call)
    assert (failure.value.kind, ends_of(failure)) == ("hang", [(1, "running"), (0, "returned")])
    assert (engine.now, engine.examined, engine.kills) == (seconds, [0, 1], 1)
    assert f"no answer within {seconds:g} s from rank 1" in failure.value.what


def test_an_answer_that_came_while_the_controller_was_stopped_is_no_hang(engine):
    """It does not run from the moment it waits until after the deadline, and the answer comes meanwhile."""
    world, wait = world_of(engine, 1), engine.wait
    world.run(lambda rank: None)

    def stopped(timeout):
        engine.wait = wait
        engine.now += 100
        return []

    engine.wait = stopped
    assert world.run(lambda rank: "an answer") == ["an answer"]


def test_a_timeout_is_a_number_of_seconds_of_which_starting_is_no_part_and_has_one_of_its_own(engine):
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a number of seconds above 0, not"):
            world_of(engine, 1).run(lambda rank: None, timeout=timeout)
    assert engine.starts == 0
    engine.starting = lambda rank: Takes(40.0)
    assert world_of(engine, 2, timeout=1.0).run(lambda rank: rank.index) == [0, 1]
    assert engine.now == 40.0
    engine.starting = lambda rank: Takes(1e9)
    with pytest.raises(RankFailure, match="start of the ranks") as failure:
        world_of(engine, 2, timeout=1.0).run(lambda rank: None)
    seconds = pool_module.MIN_START_SECONDS + 2 * pool_module.SECONDS_A_RANK
    assert (failure.value.kind, engine.now) == ("hang", 40.0 + seconds)


@pytest.mark.parametrize(("ending", "seconds"), [(Hangs(), [30, 60, 120, 240]), (Takes(20.0, Dies("by SIGKILL")), [])])
def test_a_call_that_hangs_says_whom_it_waits_for_after_half_a_minute(engine, ending, seconds):
    """After a failure the others have but a moment left."""
    heard = []
    with pytest.raises(RankFailure):
        world_of(engine, 3, timeout=300.0, on_wait=heard.append).run(lambda rank: ending if rank.index else None)
    late = "waiting for ranks 1, 2 for {} s (deadline: 300 s)"
    assert [text.partition(": ")[2] for text in heard] == list(map(late.format, seconds))


def test_after_the_first_failure_the_others_have_a_moment_to_tell_their_story(engine):
    ends = [Takes(2.0), Takes(1.0, ValueError("first")), Takes(1.3, KeyError("second")), Takes(1.5)]
    with pytest.raises(ValueError, match="first") as failure:
        world_of(engine, 4).run(lambda rank: ends[rank.index])
    assert ends_of(failure) == [(1, "raised"), (2, "raised"), (0, "running"), (3, "running")]
    assert engine.now == 1.0 + GRACE_SECONDS
    assert engine.examined == [0, 3]


def test_a_rank_that_was_not_in_the_call_dies(engine):
    world = world_of(engine, 3)
    world.run(lambda rank: None)
    engine.then(2, Takes(1.0, Dies("by SIGSEGV")))
    with pytest.raises(RankFailure) as failure:
        world.subset([0]).run(lambda rank: Takes(5.0))
    assert ends_of(failure) == [(2, "died"), (0, "running")]


class Exits:
    def __reduce__(self):
        return exit, (3,)


@pytest.mark.parametrize(("parcel", "says"), [
    (b"no pickle", "cannot be unpickled"), (b"", "cannot be unpickled"), (pickle.dumps("text"), "is no answer"),
    (pickle.dumps(Exits()), "cannot be unpickled .SystemExit"),
])  # fmt: skip
def test_what_is_no_answer_is_the_death_of_its_rank(engine, parcel, says):
    with pytest.raises(RankFailure, match=says) as failure:
        world_of(engine, 2).run(lambda rank: Sends(parcel) if rank.index else None)
    assert (failure.value.kind, ends_of(failure)) == ("crash", [(1, "died"), (0, "returned")])


def test_an_answer_to_a_call_that_is_over_counts_for_nothing(engine):
    world = world_of(engine, 1)
    world.run(lambda rank: None)
    engine.then(0, Sends(pickle.dumps(Outcome("returned", 1))))
    assert world.run(lambda rank: "mine") == ["mine"]


def test_of_those_that_hang_the_ones_that_others_wait_for_come_first(engine):
    engine.traces = {rank: Trace("training", 7.0, recorder=flight(3 if rank != 2 else 2)) for rank in range(4)}
    with pytest.raises(RankFailure) as failure:
        world_of(engine, 4).run(lambda rank: Takes(1e9))
    assert [rank for rank, _ in ends_of(failure)] == [2, 0, 1, 3]
    assert failure.value.notes == (
        "flight recorder: ranks 0, 1, 3 arrived at collective number 3 (gloo:all_reduce, started); "
        "rank 2 did not: only at number 2 (gloo:all_reduce, started)",
    )
    assert failure.value.reports[0].headline == 'rank 2 of 4, CPU: running in phase "training" for 7.0 s'


STOPPED, STUCK = CANNOT_ANSWER["T"], CANNOT_ANSWER["D"]
RAISES, DIES, RETURNS = Takes(1.0, ValueError("boom")), Takes(1.0, Dies("by SIGSEGV")), Takes(0.5)
LOST = Takes(0.9, Dies("with the process that all ranks are forked from"))
HERE, BEFORE = Trace(recorder=flight(3)), Trace(recorder=flight(2))


def fault_of(engine, *endings):
    with pytest.raises(RankFailure) as failure:
        world_of(engine, len(endings)).run(lambda rank: endings[rank.index])
    fault = failure.value.fault([gpu(index) for index in range(len(endings))])
    return fault.name, [place.index for place in fault.subjects], failure.value


@pytest.mark.parametrize(("endings", "code", "ranks"), [
    ([RETURNS, RAISES, RETURNS, RETURNS], "rank_raised", [1]),
    ([Hangs(), RAISES, RAISES, Hangs()], "rank_raised", [1, 2]),
    ([RAISES, RAISES, DIES, RAISES], "rank_died", [2]),  # their connection is gone
    ([RAISES] * 4, "rank_raised", [0, 1, 2, 3]),
    ([Takes(1.2, Dies("by SIGABRT")), DIES, Hangs(), Hangs()], "rank_died", [1]),  # as they were seen
    ([LOST] * 4, "rank_died", []),
    ([LOST], "rank_died", [0]),
])  # fmt: skip
def test_a_failure_is_the_fault_of_who_failed_and_not_of_who_tells_it(engine, endings, code, ranks):
    *found, failure = fault_of(engine, *endings)
    assert found == [code, ranks]
    assert f"rank {len(endings) - 1}" in str(failure)


ALL_HANG, ONE_HANGS = [Hangs()] * 4, [RETURNS, Hangs(), RETURNS, RETURNS]
ONE_RETURNS = [Hangs(), Hangs(), RETURNS, Hangs()]


@pytest.mark.parametrize(("endings", "traces", "ranks"), [
    (ALL_HANG, [HERE] * 4, []),
    (ALL_HANG, [Trace()] * 4, []),
    (ALL_HANG, [HERE, BEFORE, HERE, HERE], [1]),
    (ALL_HANG, [HERE, BEFORE, Trace(), HERE], [1, 2]),
    (ALL_HANG, [HERE, HERE, HERE, replace(HERE, state=STUCK)], [3]),
    (ALL_HANG, [HERE, BEFORE, HERE, replace(HERE, state=STOPPED)], [1, 3]),
    (ALL_HANG, [replace(HERE, state=STUCK)] * 4, []),  # what they share: the driver, the host
    (ALL_HANG, [Trace(state="(nothing can be seen of it: no answer)")] * 4, []),
    ([Hangs()], [Trace()], [0]),
    (ONE_HANGS, [Trace()] * 4, [1]),
    (ONE_RETURNS, [Trace()] * 4, [0, 1, 3]),  # each works alone
    (ONE_HANGS, [HERE] * 4, [1]),
    (ONE_RETURNS, [HERE] * 4, []),  # they wait for each other
    ([Hangs(), RETURNS, Hangs()], [HERE, BEFORE, HERE], [1]),  # it has returned without the others
])  # fmt: skip
def test_a_hang_names_those_that_others_wait_for_and_else_nobody(engine, endings, traces, ranks):
    engine.traces = dict(enumerate(traces))
    code, blamed, failure = fault_of(engine, *endings)
    assert (code, sorted(blamed), failure.kind) == ("rank_hung", ranks, "hang")
    assert failure.headline.startswith(f"rank {ranks[0]} of" if ranks else "ranks 0, 1, ")


def test_a_rank_that_raises_and_dies_of_it_is_reported_by_what_it_raised(engine):
    """As a GPU that is lost does it: CUDA's error, and a moment later the watchdog of NCCL."""
    endings = Hangs(), RAISES, Takes(0.8, ConnectionError("reset by peer"))
    world = world_of(engine, 3)
    world.run(lambda rank: None)
    engine.then(1, Takes(1.1, Dies("by SIGABRT")))
    with pytest.raises(ValueError, match="boom; then it died by SIGABRT") as failure:
        world.run(lambda rank: endings[rank.index])
    assert ends_of(failure) == [(1, "raised"), (2, "raised"), (0, "running")]
    fault = failure.value.fault([gpu(index) for index in range(3)])
    assert (fault.name, fault.subjects) == ("rank_raised", (gpu(1),))


def test_of_thousands_of_ranks_those_to_blame_are_reported_and_the_others_counted():
    states = ["died"] * 8 + ["running"] * 3990 + ["returned"] * 2
    reports = (RankReport(i, f"rank {i}", state, "", to_blame=i == 0) for i, state in enumerate(states))
    failure = RankFailure("crash", "test_x", tuple(reports))
    named = [line.split(":")[0] for line in str(failure).splitlines() if line.startswith("rank")]
    assert named == [f"rank {rank}" for rank in range(32)]
    assert str(failure).endswith("and 3968 more ranks: 3966 running, 2 returned")
    assert len(failure.reports) == 4000
    assert call.ranks_text(range(4000)) == f"ranks {', '.join(map(str, range(16)))} and 3984 more"
    assert call.ranks_text([2, 0]) == "ranks 0, 2"


def test_a_rank_that_dies_while_it_starts_is_named_and_a_hopeless_start_is_not_tried_for_ever(engine):
    engine.starting = lambda rank: Dies("with exit status 11") if rank else None
    world = world_of(engine, 2)
    for _ in range(MAX_FAILED_STARTS + 2):
        with pytest.raises(RankFailure, match="rank 1 of 2, CPU: died with exit status 11"):
            world.run(lambda rank: None)
    assert engine.starts == engine.kills == MAX_FAILED_STARTS


def test_failed_starts_count_in_a_row(engine):
    world = world_of(engine, 1)
    for _ in range(2):
        engine.starting = lambda rank: Dies("at first")
        for _ in range(MAX_FAILED_STARTS - 1):
            with pytest.raises(RankFailure, match="at first"):
                world.run(lambda rank: None)
        engine.starting = lambda rank: None
        assert world.run(lambda rank: rank.index) == [0]
        world._pool.stop()


def test_a_process_group_that_never_comes_up_is_not_tried_by_every_test(engine):
    engine.joining = lambda rank: RuntimeError("no such interface")
    group = world_of(engine, 2, with_group=True)
    for _ in range(MAX_FAILED_STARTS + 2):
        with pytest.raises(RankFailure, match="no such interface"):
            group.run(lambda rank: None)
    assert engine.starts == MAX_FAILED_STARTS
    assert type(group)(group._pool, False).run(lambda rank: rank.index) == [0, 1]


def test_groups_are_joined_once_in_the_order_of_their_use_and_again_in_a_fresh_world(engine):
    group = world_of(engine, 4, with_group=True)
    group.run(lambda rank: rank.group)
    group.subset([3, 1]).run(lambda rank: rank.group)
    assert group.each([[0, 1], [1 + 1, 3]], lambda rank: rank.group) == [[(0, 1)] * 2, [(2, 3)] * 2]
    group.run(lambda rank: None)
    assert engine.joined == [(0, 1, 2, 3), (1, 3), (0, 1), (2, 3)]
    group._pool.stop()
    group.each([[1, 3], [0]], lambda rank: None)
    assert engine.joined[4:] == [(1, 3), (0,)]


def test_the_first_call_waits_for_ranks_that_were_begun_before(engine):
    events = []
    engine.starting = lambda index: Takes(3.0)
    world = world_of(engine, 2, on_event=events.append)
    world._pool.begin()
    assert (engine.starts, engine.now, events) == (1, 0.0, [])
    engine.now = 1.0  # something else was done meanwhile
    for _ in range(2):
        assert world.run(lambda rank: rank.index) == [0, 1]
    assert (engine.starts, events) == (1, [WorldStarted(ranks=2, seconds=2.0)])


def test_ranks_that_were_begun_are_killed_when_they_are_not_used_and_when_they_do_not_come_up(engine):
    world = world_of(engine, 2)
    world._pool.begin()
    world._pool.stop()
    assert (engine.starts, engine.kills) == (1, 1)
    engine.starting = lambda index: Takes(1.0, OSError("no such device"))
    world._pool.begin()
    with pytest.raises(RankFailure) as failure:
        world.run(lambda rank: None)
    assert (failure.value.kind, engine.starts, engine.kills) == ("exception", 2, 2)


def test_a_rank_that_cannot_be_killed_ends_the_use_of_its_gpu(engine):
    world = world_of(engine, 2)
    engine.unkillable = {1: "(in a system call that cannot be interrupted)"}
    with pytest.raises(ZeroDivisionError):
        world.run(lambda rank: 1 / 0)
    for _ in range(2):
        with pytest.raises(RankFailure, match=r"rank 1 of 2, CPU: running and could not be killed within 10 s \(in a"):
            world.run(lambda rank: None)
    assert engine.starts == 1
    engine.unkillable = {}
    world._pool.start_on(specs(2))  # others
    assert world.run(lambda rank: rank.index) == [0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_whatever_ends_the_wait_ends_the_ranks(engine, error):
    world = world_of(engine, 1)
    world.run(lambda rank: None)

    def interrupted(timeout):
        del engine.wait
        raise error

    engine.wait = interrupted
    with pytest.raises(error):
        world.run(lambda rank: None)
    assert engine.kills == 1
    assert world.run(lambda rank: "fresh") == ["fresh"]


def test_a_test_that_is_none_of_the_suite_leaves_its_name_on_the_ranks(engine):
    running = "test_theirs"
    world = world_of(engine, 1, foreign_test=lambda: running)
    world.run(lambda rank: None)
    running = ""
    world.run(lambda rank: None)
    assert world._pool.used_by == "test_theirs"
    world._pool.stop()
    world.run(lambda rank: None)
    assert world._pool.used_by == ""


@pytest.mark.parametrize("for_good", [False, True])
def test_a_thread_that_a_test_has_left_behind_keeps_nobody_and_starts_no_ranks_after_the_last_test(engine, for_good):
    world, ended, waiting = world_of(engine, 1, timeout=1e12), [], threading.Event()
    wait = engine.wait

    def left_behind():
        with pytest.raises(RuntimeError, match="its ranks are stopped"):
            world.run(lambda rank: Takes(1e12))
        ended.append(engine.kills)

    engine.wait = lambda timeout: waiting.set() or wait(timeout)
    thread = threading.Thread(target=left_behind)
    thread.start()
    waiting.wait()
    world._pool.stop(for_good)
    thread.join(60)
    assert ended == [1]
    if for_good:
        left_behind()
        assert engine.starts == 1


def test_a_call_within_a_call_of_the_same_thread_is_refused(engine):
    world = world_of(engine, 1)
    engine.starting = lambda rank: world.run(print)
    with pytest.raises(RankFailure, match="was not yet done"):
        world.run(print)


def place(rank):
    return rank.index, rank.size


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3], [4, 5]], [[3, 4, 5], [0, 1]], [[5], [0, 2, 4, 1]], []], ids=str)
def test_groups_count_from_0_and_results_come_in_their_order(engine, groups):
    results = world_of(engine, 6).each(groups, place)
    assert results == [[(index, len(group)) for index in range(len(group))] for group in groups]


def test_groups_that_share_a_rank_are_refused_and_those_of_a_subset_are_counted_within_it(engine):
    world = world_of(engine, 4)
    for groups in ([[0, 1], [1, 2]], [world.subset([0, 1]), [1, 2]]):
        with pytest.raises(ValueError, match=r"share no rank, as \[0, 1\] and \[1, 2\] do"):
            world.each(groups, place)
    for ranks in ([], [4], [-1], [1, 9]):
        with pytest.raises(ValueError, match="not a subset of the 4 ranks"):
            world.each([[0], ranks], place)
    with pytest.raises(ValueError, match="not of this world"):
        world.subset([0, 1]).each([world.subset([2])], place)
    assert engine.starts == 0
    subset = world_of(engine, 6, with_group=True).subset([1, 3, 5])
    assert subset.each([[2], [1, 0]], lambda rank: rank.group) == [[(5,)], [(1, 3), (1, 3)]]
    assert subset.each([subset.subset([2]), [0]], lambda rank: rank.group) == [[(5,)], [(1,)]]


def test_a_failure_in_one_group_names_its_rank_and_tells_of_all(engine):
    engine.traces = {0: Trace(recorder=flight(1)), 2: Trace(recorder=flight(9)), 3: Trace()}

    def body(rank, late):
        if rank.group[rank.index] in late:
            raise Hangs

    group = world_of(engine, 6, with_group=True)
    with pytest.raises(RankFailure) as failure:
        group.each([[0, 1], [2, 3], [4, 5]], body, [2, 3])
    assert ends_of(failure) == [(3, "running"), (2, "running"), *((rank, "returned") for rank in (0, 1, 4, 5))]
    assert failure.value.notes == (  # nothing of groups that have ended
        "flight recorder: rank 2 arrived at collective number 9 (gloo:all_reduce, started); rank 3 did not: at none",
    )
    assert "from ranks 2, 3" in failure.value.what


def test_nodes_are_worlds_of_their_own_of_which_their_ranks_know_the_size(engine):
    world = world_of(engine, 2, 3, with_group=True)
    places = [["cpu0", "cpu1"], ["node1/cpu0", "node1/cpu1", "node1/cpu2"]]
    assert [list(map(str, node.places)) for node in world.nodes] == places
    assert world.each(world.nodes, lambda rank: rank.group) == [[(0, 1)] * 2, [(2, 3, 4)] * 3]
    assert [node.size for node in world.subset([0, 2, 4]).nodes] == [1, 2]
    assert [node.run(lambda rank: rank.node) for node in world.nodes] == [[0, 0], [1, 1, 1]]
    assert world.run(lambda rank: rank.local_size) == [2, 2, 3, 3, 3]
    assert world.subset([0, 2, 4]).run(lambda rank: rank.local_size) == [1, 2, 2]
    assert world.each([[0], [2, 3], [4]], lambda rank: rank.local_size) == [[1], [3, 3], [3]]
