"""Figures of collectives, and what they were measured with."""

import json

from pytest_gpufleet import WORLD, measure_all
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth, collective_latency, sweep
from pytest_gpufleet.probes.collectives.table import COLLECTIVES


def test_figures(nccl_group):
    measured = []
    for name in COLLECTIVES:
        measured += measure_all(nccl_group, sweep, collective_latency, name, [8, 1024])
        measured += measure_all(nccl_group, sweep, bus_bandwidth, name, [65536])
    measured += measure_all(nccl_group, sweep, bus_bandwidth, "all_gather", [65536], in_place=True)
    for one in measured:
        assert one.definition.unit == {"busbw": "GB/s", "collective_latency": "us"}[one.metric]
        assert len(one.samples[WORLD]) == {"busbw": 3, "collective_latency": 5}[one.metric]
        assert one.values[WORLD] > 0
    with open("figures.json", "w") as file:
        json.dump([[one.metric, dict(one.conditions)] for one in measured], file)


def test_a_slow_rank_counts(nccl_group):
    import time

    import torch.distributed as dist

    def slow(rank):
        genuine = dist.all_to_all_single
        if rank.index == 1:
            dist.all_to_all_single = lambda *args, **kwargs: (time.sleep(0.01), genuine(*args, **kwargs))[1]
        return collective_latency(rank, "all_to_all", 8)

    (one,) = measure_all(nccl_group, slow)
    assert one.values[WORLD] > 10_000


def test_what_is_timed_delivers_what_is_expected(nccl_group):
    import torch

    def delivered(rank):
        received = {}
        for name, collective in COLLECTIVES.items():
            input, output = collective.buffers(6, rank.size, rank.index, False, torch.zeros)
            if collective.in_place == "always":
                input = output
            input.copy_(torch.arange(len(input)) + 100 * rank.index)
            collective.run(rank.group, output, input, root=1)
            received[name] = output.tolist()
        return received

    each = nccl_group.run(delivered)
    for name, collective in COLLECTIVES.items():
        inputs = torch.stack([torch.arange(2 if collective.one_part == "input" else 6) + 100 * k for k in range(3)])
        for me, received in enumerate(each):
            expected = collective.expected(inputs, me, 1, lambda stacked: stacked.sum(0))
            assert (expected is None) == (name in ("reduce", "gather") and me != 1)  # who is not the root gets nothing
            if expected is not None:
                assert received[name] == expected.tolist(), (name, me)
