"""What runs on ranks and measures one thing: the probes of the suite, for checks of one's own.

A name is loaded at its first use, since most need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpufleet.probes.adapter_loopback import LOOPBACK_BYTES as LOOPBACK_BYTES
    from pytest_gpufleet.probes.adapter_loopback import LOOPBACK_INTERFACE as LOOPBACK_INTERFACE
    from pytest_gpufleet.probes.adapter_loopback import adapter_bandwidth as adapter_bandwidth
    from pytest_gpufleet.probes.adapter_loopback import adapters_in_loopback as adapters_in_loopback
    from pytest_gpufleet.probes.collectives.exactness import KINDS as KINDS
    from pytest_gpufleet.probes.collectives.exactness import Delivery as Delivery
    from pytest_gpufleet.probes.collectives.exactness import exchange as exchange
    from pytest_gpufleet.probes.collectives.large_all_reduce import large_all_reduce as large_all_reduce
    from pytest_gpufleet.probes.collectives.launching import launch_time as launch_time
    from pytest_gpufleet.probes.collectives.repeated import stays_exact as stays_exact
    from pytest_gpufleet.probes.collectives.repeated import two_at_once as two_at_once
    from pytest_gpufleet.probes.collectives.speed import collective_latency as collective_latency
    from pytest_gpufleet.probes.collectives.speed import fitting as fitting
    from pytest_gpufleet.probes.collectives.speed import sweep as sweep
    from pytest_gpufleet.probes.collectives.table import COLLECTIVES as COLLECTIVES
    from pytest_gpufleet.probes.collectives.under_load import retention_under_load as retention_under_load
    from pytest_gpufleet.probes.collectives.under_load import wrong_under_load as wrong_under_load
    from pytest_gpufleet.probes.compute.corruption import dissenters as dissenters
    from pytest_gpufleet.probes.compute.corruption import exact_product as exact_product
    from pytest_gpufleet.probes.compute.fixed_work import fingerprints as fingerprints
    from pytest_gpufleet.probes.compute.rate import PRECISIONS as PRECISIONS
    from pytest_gpufleet.probes.compute.rate import precisions_of as precisions_of
    from pytest_gpufleet.probes.compute.rate import product_rate as product_rate
    from pytest_gpufleet.probes.compute.rate import relative_rate as relative_rate
    from pytest_gpufleet.probes.compute.soak import Turn as Turn
    from pytest_gpufleet.probes.compute.soak import rate_of as rate_of
    from pytest_gpufleet.probes.compute.soak import soak_figures as soak_figures
    from pytest_gpufleet.probes.compute.soak import soak_turn as soak_turn
    from pytest_gpufleet.probes.disk_reads import DriveRead as DriveRead
    from pytest_gpufleet.probes.disk_reads import read_drive as read_drive
    from pytest_gpufleet.probes.links.copying import Copied as Copied
    from pytest_gpufleet.probes.links.host_copies import ONE_WAY as ONE_WAY
    from pytest_gpufleet.probes.links.host_copies import HostDirection as HostDirection
    from pytest_gpufleet.probes.links.host_copies import host_bandwidth as host_bandwidth
    from pytest_gpufleet.probes.links.host_copies import pcie_generation_under_load as pcie_generation_under_load
    from pytest_gpufleet.probes.links.pairs import PairDirection as PairDirection
    from pytest_gpufleet.probes.links.pairs import pair_bandwidth as pair_bandwidth
    from pytest_gpufleet.probes.links.pairs import pair_latency as pair_latency
    from pytest_gpufleet.probes.links.pairs import wrong_data as wrong_data
    from pytest_gpufleet.probes.memory.bandwidth import memory_bandwidth as memory_bandwidth
    from pytest_gpufleet.probes.memory.clocks import clocks_under_load as clocks_under_load
    from pytest_gpufleet.probes.memory.host_triad import host_memory_bandwidth as host_memory_bandwidth
    from pytest_gpufleet.probes.memory.patterns import PatternTest as PatternTest
    from pytest_gpufleet.probes.memory.patterns import hold_patterns as hold_patterns
    from pytest_gpufleet.probes.nodes.curve import affordable as affordable
    from pytest_gpufleet.probes.nodes.curve import collective_curve as collective_curve
    from pytest_gpufleet.probes.nodes.curve import doubling as doubling
    from pytest_gpufleet.probes.nodes.node_groups import groups_of_nodes as groups_of_nodes
    from pytest_gpufleet.probes.nodes.node_groups import pairs_of_nodes as pairs_of_nodes
    from pytest_gpufleet.probes.nodes.rails import RailsAtOnce as RailsAtOnce
    from pytest_gpufleet.probes.nodes.rails import rail_bandwidth as rail_bandwidth
    from pytest_gpufleet.probes.nodes.rails import rails_of as rails_of
    from pytest_gpufleet.probes.search.slow_alone import one_at_a_time as one_at_a_time
    from pytest_gpufleet.probes.search.slow_alone import why_slow as why_slow
    from pytest_gpufleet.probes.search.slow_between_nodes import who_slows_nodes as who_slows_nodes
    from pytest_gpufleet.probes.search.slow_between_nodes import who_slows_rails as who_slows_rails
    from pytest_gpufleet.probes.search.slow_collective import who_is_slow as who_is_slow
    from pytest_gpufleet.probes.search.slow_pairs import who_slows_pairs as who_slows_pairs
    from pytest_gpufleet.probes.search.wrong_data import who_corrupts as who_corrupts
    from pytest_gpufleet.probes.training.batch_size import FILLED as FILLED
    from pytest_gpufleet.probes.training.batch_size import fill_memory as fill_memory
    from pytest_gpufleet.probes.training.batch_size import throughput_by_batch as throughput_by_batch
    from pytest_gpufleet.probes.training.batches_on_gpus import throughput_on_gpus as throughput_on_gpus
    from pytest_gpufleet.probes.training.gpu_decoder import decoder_difference as decoder_difference
    from pytest_gpufleet.probes.training.gpu_decoder import wrongly_decoded as wrongly_decoded
    from pytest_gpufleet.probes.training.loader import fed_throughput as fed_throughput
    from pytest_gpufleet.probes.training.loader import write_photos as write_photos
    from pytest_gpufleet.probes.training.loop import train_throughput as train_throughput
    from pytest_gpufleet.probes.training.method_comparison import in_words as in_words
    from pytest_gpufleet.probes.training.method_comparison import throughput_by as throughput_by
    from pytest_gpufleet.probes.training.recipes import Workload as Workload
    from pytest_gpufleet.probes.training.replicas import differences as differences
    from pytest_gpufleet.probes.training.sampler_shards import sampler_errors as sampler_errors
    from pytest_gpufleet.probes.training.sampler_shards import sampler_shards as sampler_shards
    from pytest_gpufleet.probes.training.sharding import fully_sharded as fully_sharded
    from pytest_gpufleet.probes.training.sharding import held as held
    from pytest_gpufleet.probes.training.sharding import own_shard as own_shard
    from pytest_gpufleet.probes.training.small_network import batch as batch
    from pytest_gpufleet.probes.training.small_network import full_precision as full_precision
    from pytest_gpufleet.probes.training.small_network import known_average as known_average
    from pytest_gpufleet.probes.training.small_network import known_input as known_input
    from pytest_gpufleet.probes.training.small_network import known_layer as known_layer
    from pytest_gpufleet.probes.training.small_network import network as network
    from pytest_gpufleet.probes.training.transformer import SHAPES as SHAPES
    from pytest_gpufleet.probes.training.transformer_exactness import ends_alike as ends_alike
    from pytest_gpufleet.probes.training.transformer_exactness import follows_fp32 as follows_fp32
    from pytest_gpufleet.probes.training.transformer_exactness import trains_as_one as trains_as_one
    from pytest_gpufleet.probes.training.transformer_step import token_throughput as token_throughput

_NAMES = {
    "adapter_loopback": ("LOOPBACK_BYTES", "LOOPBACK_INTERFACE", "adapter_bandwidth", "adapters_in_loopback"),
    "collectives.exactness": ("KINDS", "Delivery", "exchange"),
    "collectives.large_all_reduce": ("large_all_reduce",),
    "collectives.launching": ("launch_time",),
    "collectives.repeated": ("stays_exact", "two_at_once"),
    "collectives.speed": ("collective_latency", "fitting", "sweep"),
    "collectives.table": ("COLLECTIVES",),
    "collectives.under_load": ("retention_under_load", "wrong_under_load"),
    "compute.corruption": ("dissenters", "exact_product"),
    "compute.fixed_work": ("fingerprints",),
    "compute.rate": ("PRECISIONS", "precisions_of", "product_rate", "relative_rate"),
    "compute.soak": ("Turn", "rate_of", "soak_figures", "soak_turn"),
    "disk_reads": ("DriveRead", "read_drive"),
    "links.copying": ("Copied",),
    "links.host_copies": ("ONE_WAY", "HostDirection", "host_bandwidth", "pcie_generation_under_load"),
    "links.pairs": ("PairDirection", "pair_bandwidth", "pair_latency", "wrong_data"),
    "memory.bandwidth": ("memory_bandwidth",),
    "memory.clocks": ("clocks_under_load",),
    "memory.host_triad": ("host_memory_bandwidth",),
    "memory.patterns": ("PatternTest", "hold_patterns"),
    "nodes.curve": ("affordable", "collective_curve", "doubling"),
    "nodes.node_groups": ("groups_of_nodes", "pairs_of_nodes"),
    "nodes.rails": ("RailsAtOnce", "rail_bandwidth", "rails_of"),
    "search.slow_alone": ("one_at_a_time", "why_slow"),
    "search.slow_between_nodes": ("who_slows_nodes", "who_slows_rails"),
    "search.slow_collective": ("who_is_slow",),
    "search.slow_pairs": ("who_slows_pairs",),
    "search.wrong_data": ("who_corrupts",),
    "training.batch_size": ("FILLED", "fill_memory", "throughput_by_batch"),
    "training.batches_on_gpus": ("throughput_on_gpus",),
    "training.gpu_decoder": ("decoder_difference", "wrongly_decoded"),
    "training.loader": ("fed_throughput", "write_photos"),
    "training.loop": ("train_throughput",),
    "training.method_comparison": ("in_words", "throughput_by"),
    "training.recipes": ("Workload",),
    "training.replicas": ("differences",),
    "training.sampler_shards": ("sampler_errors", "sampler_shards"),
    "training.sharding": ("fully_sharded", "held", "own_shard"),
    "training.small_network": ("batch", "full_precision", "known_average", "known_input", "known_layer", "network"),
    "training.transformer": ("SHAPES",),
    "training.transformer_exactness": ("ends_alike", "follows_fp32", "trains_as_one"),
    "training.transformer_step": ("token_throughput",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = tuple(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
