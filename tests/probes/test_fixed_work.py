"""The fingerprint of ranks: the same on all of them and again, and a rank that computes otherwise is named."""

from pathlib import Path

import pytest

from tests.probes.test_compute import FAULT

FINGERPRINT = Path(__file__).parents[2] / "acceptance" / "test_3_fingerprint.py"
CASES = ("products", "reductions", "training")


def test_all_ranks_compute_the_same_and_again_in_another_run(run_pytest):
    first, second = (
        run_pytest(FINGERPRINT, "--rehearse=2", "--fleet-dir=runs", OMP_NUM_THREADS=threads) for threads in ("1", "2")
    )
    assert (first.status, set(first.outcomes.values())) == (0, {"passed"}), first.text
    taken = first.record.fingerprints
    assert len(taken) == len(CASES) + 1
    assert all(part.output for each in taken.values() for one in each for part in one.parts.values())
    assert taken == second.record.fingerprints  # whatever the number of threads


@pytest.mark.parametrize(
    ("fault", "what"), [("always bit", "other bits than most"), ("now and then bit", "other bits each time")]
)
def test_a_rank_that_computes_otherwise_is_named(planted, fault, what):
    run = planted(FAULT, fault, FINGERPRINT, "-k", "same_bits", "--rehearse=3")
    outcomes = {name.partition("[")[2][:-1]: outcome for name, outcome in run.outcomes.items()}
    assert outcomes == {"products": "failed", "reductions": "passed", "training": "passed"}
    (fault,) = run.record.faults
    assert (fault.name, [*map(str, fault.subjects)]) == ("gpu_bits_differ", ["cpu1"])
    assert what in fault.what
