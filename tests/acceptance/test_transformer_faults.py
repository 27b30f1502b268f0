"""Training of a transformer, and work under load, that go wrong on purpose: the rank that does it is named."""

import pytest

from pytest_gpufleet.verdict.gaps import without_figures
from tests.acceptance import test_acceptance
from tests.conftest import ACCEPTANCE
from tests.probes import test_compute

TRANSFORMER, UNDER_LOAD = ACCEPTANCE / "test_8_transformer.py", ACCEPTANCE / "test_6_under_load.py"

FAULTY = """
import time

import torch


def change(owner, name, make):
    setattr(owner, name, make(getattr(owner, name)))


def attention(genuine):
    def wrong(q, k, v, **how):
        result = genuine(q, k, v, **how)
        return result * 0 if q.dtype == torch.bfloat16 else result
    return wrong


def adam(genuine):
    def step(self, *args, **kwargs):
        genuine(self, *args, **kwargs)
        self.param_groups[0]["params"][0].detach().view(-1)[:1].view(torch.uint8)[0] ^= 1
    return step


def late(genuine):
    def step(self, *args, **kwargs):
        time.sleep(0.2)
        genuine(self, *args, **kwargs)
    return step


FAULTS = {
    "attention": lambda: change(torch.nn.functional, "scaled_dot_product_attention", attention),
    "weight": lambda: change(torch.optim.AdamW, "step", adam),
    "late": lambda: change(torch.optim.AdamW, "step", late),
}


def plant(rank, fault):
    if rank.index == 1:
        FAULTS[fault]()
"""


@pytest.mark.parametrize(("check", "plant", "fault", "code"), [
    (f"{TRANSFORMER}::test_loss_follows_fp32", FAULTY, "attention", "training_wrong"),
    (f"{TRANSFORMER}::test_ranks_end_alike", FAULTY, "weight", "replicas_differ"),
    (f"{UNDER_LOAD}::test_both_stay_exact", test_compute.FAULT, "one bit", "matmul_nondeterministic"),
    (f"{UNDER_LOAD}::test_both_stay_exact", test_acceptance.FAULT, "flip", "collective_wrong"),
])  # fmt: skip
def test_the_rank_that_is_wrong_is_named(planted, check, plant, fault, code):
    run = planted(plant, fault, check, "--rehearse=3")
    assert [(each.name, [place.index for place in each.subjects]) for each in run.record.faults] == [(code, [1])]


def test_a_late_rank_is_slower_alone(planted):
    run = planted(FAULTY, "late", f"{TRANSFORMER}::test_speed", "--rehearse=3")
    (tokens,) = (each.measurement for each in run.record.findings if each.measurement.metric == "solo_token_throughput")
    rates = {place.index: value for place, value in tokens.values.items()}
    assert rates[1] == min(rates.values()), run.text
    assert rates[1] < 0.9 * max(rates.values())


def test_every_figure_that_a_check_is_there_for_is_left_wherever_it_runs(run_pytest):
    """Also under FSDP, and where no peak is known, as of CPU ranks or of a GPU that is newer than this version."""
    speed = "test_speed and not alone or alone and 0.6b"
    names = f"{speed} or ddp_and_fsdp or what_each_keeps"
    options = ("--rehearse=2", "--fleet-level=burnin", "--fleet-dir=runs", "-k", names)
    run = run_pytest(TRANSFORMER, UNDER_LOAD, *options)
    assert [check.outcome for check in run.record.checks.values()] == ["passed"] * 5
    assert [*without_figures(run.record)] == []
