"""Debuggers on ranks: who gets the terminal, and what stands still meanwhile. Each run has a terminal of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_gpufleet.world.debugging import Loan, Loans, Returned, Wanted
from tests.conftest import KEPT, ROOT, SECONDS, lay_out, lead_the_terminal

MODULE = """
import pytest
import torch
import torch.distributed as dist

def test_first(nccl_group):
    nccl_group.run(lambda rank: None)

@pytest.mark.spmd
def test_breakpoint(rank, nccl_group):
    x = torch.tensor([rank.index + 1.0])
    breakpoint()
    dist.all_reduce(x, group=nccl_group)
    assert x.item() == 3

@pytest.mark.spmd
def test_set_trace(rank):
    import pdb; pdb.set_trace()
    assert rank.size == 2

def of_rank_1(rank):
    found = 41 + rank.index
    assert found == 41

def test_fails_on_rank_1(world):
    world.run(of_rank_1)

@pytest.mark.spmd
def test_after(rank):
    assert rank.size == 2
"""
PROMPT = "(Pdb) "


def typed(folder: Path, *arguments: str, answers: Sequence[str]) -> str:
    """All that a terminal shows in which pytest is run, and an answer is typed at each prompt."""
    lay_out(folder, {"test_inner.py": MODULE})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--color=no",
        "--rehearse=2",
        "--fleet-dir=reports",
    ]
    terminal, theirs = os.openpty()
    process = subprocess.Popen(
        [*command, *arguments], cwd=folder, env={**KEPT, "PYTHONPATH": str(ROOT)}, stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True, preexec_fn=lead_the_terminal,
    )  # fmt: skip
    os.close(theirs)
    shown, looked_at, left = "", 0, list(answers)
    try:
        while select.select([terminal], [], [], SECONDS)[0] and (read := os.read(terminal, 1 << 16)):
            shown += read.decode(errors="replace")
            while left and (at := shown.find(PROMPT, looked_at)) >= 0:
                looked_at = at + len(PROMPT)
                os.write(terminal, left.pop(0).encode())
    except OSError:  # the other end was closed
        pass
    finally:
        os.close(terminal)
        process.wait()
    assert not left, shown
    return shown


def test_rank_0_gets_the_terminal_and_time_stands_still(tmp_path):
    shown = typed(
        tmp_path, "--fleet-timeout=5", "-k", "first or breakpoint or after",
        answers=["p ('index', rank.index)\n", "\x03", "!import time; time.sleep(6)\n", "n\n", "c\n"],
    )  # fmt: skip
    assert "('index', 0)" in shown
    assert "--KeyboardInterrupt--" in shown
    assert "-> assert x.item() == 3" in shown
    assert "3 passed" in shown


def test_another_rank_is_chosen(tmp_path):
    shown = typed(tmp_path, "--fleet-pdb-rank=1", "-k", "set_trace", answers=["p ('index', rank.index)\n", "c\n"])
    assert "('index', 1)" in shown
    assert "1 passed" in shown


def test_quitting_fails_the_test(tmp_path):
    shown = typed(tmp_path, "-k", "breakpoint or after", answers=["q\n"])
    assert "the debugger was told to quit" in shown
    assert "1 failed, 1 passed" in shown


def test_a_failure_is_looked_at_on_its_rank(tmp_path):
    shown = typed(tmp_path, "--pdb", "-k", "fails or after", answers=["p ('found', found)\n", "q\n"])
    assert "('found', 42)" in shown
    assert "pytest_gpufleet/" not in shown
    assert "1 failed, 1 passed" in shown


def test_without_a_terminal_a_sentence(fleet):
    run = fleet(MODULE, "-k", "breakpoint or after")
    assert run.outcomes == {"test_breakpoint": "failed", "test_after": "passed"}
    assert "breakpoint() on a rank: it needs a terminal" in run.check("test_breakpoint").message


class Heard:
    post_mortem = False

    def __init__(self):
        self.submitted = []
        self.taken_back = 0
        self.now = 0.0

    def submit(self, ranks, parcel):
        self.submitted += ranks

    def lend(self, rank, ranks, wanted):
        return Loan("/dev/pts/1")

    def take_back(self):
        self.taken_back += 1


@pytest.mark.parametrize("ending", ["returned", "died", "call over"])
def test_the_time_of_a_call_stands_still_while_the_terminal_is_lent(ending):
    heard = Heard()
    loans = Loans(heard, (0, 1), heard, lambda: heard.now)
    heard.now = 1.0
    loans.hear(0, Wanted(7, failed=False))
    loans.hear(1, Wanted(8, failed=False))  # who is told at once that somebody else has it
    heard.now = 11.0
    assert loans.now() == 1.0
    loans.over(1)  # another rank died
    assert heard.taken_back == 0
    {"returned": lambda: loans.hear(0, Returned()), "died": lambda: loans.over(0), "call over": loans.over}[ending]()
    loans.over()
    heard.now = 12.0
    assert (loans.now(), heard.taken_back, heard.submitted) == (2.0, 1, [0, 1])
