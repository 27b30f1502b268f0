"""The levels of the suite, and what its checks are called. Which checks a level requires is in the manifest."""

from typing import Literal, get_args

Level = Literal["quick", "standard", "burnin"]
LEVELS: tuple[Level, ...] = get_args(Level)
BURN_IN_SECONDS = 900.0  # what level burnin asks for


def includes(level: str, lowest: str) -> bool:
    """Whether a run at `level` contains what is marked with `lowest`."""
    return LEVELS.index(lowest) <= LEVELS.index(level)


def case_name(node_id: str) -> str:
    """ "acceptance/test_1_inventory.py::test_gpu_count[x]" -> "test_1_inventory.py::test_gpu_count[x]": the folders in
    a node id follow from how the run was called, and are no part of the name."""
    path, separator, case = node_id.partition("::")
    return f"{path.rsplit('/', 1)[-1]}{separator}{case}"


def check_name(node_id: str) -> str:
    """ "acceptance/test_1_inventory.py::test_gpu_count[x]" -> "test_1_inventory.py::test_gpu_count" """
    return case_name(node_id).split("[", 1)[0]
