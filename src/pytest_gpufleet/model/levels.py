"""The levels of the suite, and what its checks are called. Which checks a level requires is in the manifest."""

import math
from typing import Literal, get_args

Level = Literal["quick", "standard", "burnin"]
LEVELS: tuple[Level, ...] = get_args(Level)
BURN_IN_SECONDS = 900.0  # what level burnin asks for
MATMULS = 0.6  # of the time of a burn-in: tensor cores draw the most power
NO_EVENT = -math.log(1 - 0.95)  # events are rarer than 3.0 in n, with 95 %, if none came in n (the rule of three)


def seconds_until_rare(bound: float, gpus: int) -> float:
    """How long so many GPUs burn in until corruption of matmuls is rarer than once in `bound` seconds of a GPU."""
    return math.ceil(NO_EVENT * bound / (max(1, gpus) * MATMULS))


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
