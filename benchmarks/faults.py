"""What each fault costs: detected after, attributed to, working again after. Prints a Markdown table.

    python benchmarks/faults.py                 4 CPU ranks
    python benchmarks/faults.py --gpus 4        4 GPUs (and the faults that only GPUs have)
    python benchmarks/faults.py --repeat 200    the whole table 200 times; stops at the first one that is not caught
    python benchmarks/faults.py --freezes 200   2 CPU ranks, one of them stopped at a random moment of its answer
    python benchmarks/faults.py --nodes 30      every fault of a node 30 times, on hosts of namespaces; as root

"Detected after" counts from the moment the ranks get the call (for a hang: from its deadline) to the error in the
controller, with the 0.4 s that the other ranks get to report their own failure. "Working again" is a fresh world with
its process group and an exact all_reduce.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "world"))

from faults import CULPRIT, FAULTS, HANG_SECONDS, RANKS, all_reduce, cause

from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.world.call import ship_by_value
from pytest_gpufleet.world.failure import RankFailure


def measure(group, name):
    """The failure and its two times; RuntimeError if it was not caught, described wrongly or left a broken world."""
    fault = FAULTS[name]
    group.run(all_reduce)
    began = time.monotonic()
    try:
        group.run(cause, name, timeout=HANG_SECONDS if fault.kind in ("hang", "") else None)
    except RankFailure as failure:
        detected = time.monotonic() - began - (HANG_SECONDS if failure.kind == "hang" else 0)
        story = failure
    else:
        raise RuntimeError(f"{name}: not caught")
    culprit = story.reports[0]
    if fault.kind and (story.kind != fault.kind or (fault.others != "same" and culprit.rank != CULPRIT)):
        raise RuntimeError(f"{name}: described wrongly\n{story}")
    if missing := [words for words in fault.says if words not in str(story)]:
        raise RuntimeError(f"{name}: {missing} missing\n{story}")
    began = time.monotonic()
    expected = RANKS * (RANKS + 1) // 2
    if group.run(all_reduce) != [expected] * RANKS:
        raise RuntimeError(f"{name}: the next collective is wrong")
    return story.headline.partition("\n")[0], detected, time.monotonic() - began


FREEZE_DEADLINE = 2.0
FREEZE_WITHIN = 0.01  # about as long as an answer of this length takes
LONG_TEXT = "\N{GRINNING FACE}" * (1 << 17)  # more than a socket buffers, even when it is cut


def freeze_while_answering(rank, seconds):
    if rank.index == 1:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        raise ValueError(LONG_TEXT)


def no_op(rank):
    return None


def freezes(count):
    """What became of each, and the longest time that the controller took."""
    run = Run(Options(rehearse=2))
    world = run.ranks.world(with_group=False)
    kinds, slowest = collections.Counter(), 0.0
    for _ in range(count):
        world.run(no_op)
        began = time.monotonic()
        try:
            world.run(freeze_while_answering, random.uniform(0, FREEZE_WITHIN), timeout=FREEZE_DEADLINE)
        except RankFailure as failure:
            if failure.reports[0].rank != 1:
                raise RuntimeError(f"described wrongly\n{failure}") from None
            kinds[failure.kind] += 1
        slowest = max(slowest, time.monotonic() - began)
        print(f"\r{kinds.total()} of {count}", end="", file=sys.stderr, flush=True)
    run.close()
    print(f"\n{count} freezes: {kinds['hang']} before the answer was out, reported as a hang of that rank,")
    print(f"{kinds['exception']} after it, as its exception; deadline {FREEZE_DEADLINE:g} s, slowest {slowest:.2f} s")


NODES = Path(__file__).parents[1] / "tests" / "nodes"


def of_nodes(count):
    """How often each fault was not as it should be, and how long its test took. Each round is a pytest of its own."""
    seconds, flakes = collections.defaultdict(list), collections.Counter()
    files = [str(NODES / "test_faults_of_nodes.py")]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        for number in range(1, count + 1):
            command = [sys.executable, "-m", "pytest", "-q", *files, f"--junitxml={results}"]
            # Else they skip themselves: they want the machine to themselves.
            subprocess.run(command, env={**os.environ, "GPUFLEET_ALONE": "1"}, check=False)
            for case in ElementTree.parse(results).iter("testcase"):
                name = case.get("name").removeprefix("test_").replace("_", " ")
                seconds[name].append(float(case.get("time")))
                flakes[name] += any(case.find(end) is not None for end in ("failure", "error", "skipped"))
            print(f"{number} of {count}: {flakes.total()} not as expected", flush=True)
    print("\n| what | times | not as expected | median | longest |\n| --- | ---: | ---: | ---: | ---: |")
    for name, took in seconds.items():
        print(f"| {name} | {len(took)} | {flakes[name]} | {median(took):.0f} s | {max(took):.0f} s |")
    sys.exit(1 if flakes.total() else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--freezes", type=int)
    parser.add_argument("--gpus", type=int, choices=[RANKS])
    parser.add_argument("--nodes", type=int, metavar="TIMES")
    parser.add_argument("--repeat", type=int, default=1)
    asked = parser.parse_args()
    if asked.freezes:
        freezes(asked.freezes)
    elif asked.nodes:
        of_nodes(asked.nodes)
    else:
        table(asked)


def table(asked):
    run = Run(Options(gpus=asked.gpus) if asked.gpus else Options(rehearse=RANKS))
    ship_by_value(sys.modules["faults"])
    group = run.ranks.world(with_group=True)
    names = [name for name, fault in FAULTS.items() if asked.gpus or not fault.needs_gpu]
    for number in range(asked.repeat):
        rows = []
        for name in names:
            try:
                rows.append((name, *measure(group, name)))
            except RuntimeError as wrong:
                print(f"round {number + 1}: {wrong}", flush=True)
                sys.exit(1) if asked.repeat > 1 else rows.append((name, None, 0.0, 0.0))
        if asked.repeat > 1:
            print(f"{number + 1} of {asked.repeat}: all {len(names)} faults caught, named and survived", flush=True)
    print(f"{group.size} ranks: {run.target.headline(run.options.level, run.options.basis)}\n")
    print("| fault | detected after | attributed to | working again after |\n| --- | ---: | --- | ---: |")
    for name, headline, detected, again in rows:
        text = (headline or "**not as expected**")[:90].rstrip()
        print(f"| {name} | {detected:.2f} s | {text} | {again:.2f} s |")
    run.close()


if __name__ == "__main__":
    main()
