"""Ranks in the process of the tests, as those of probes have them."""

from tests.probes.conftest import on_ranks, two_ranks, worlds

__all__ = ["on_ranks", "two_ranks", "worlds"]
