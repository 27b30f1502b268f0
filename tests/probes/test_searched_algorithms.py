"""Which trainings let cuDNN look for its fastest algorithms."""

import pytest
import torch

from pytest_gpufleet.probes.training.loop import precision
from pytest_gpufleet.probes.training.recipes import RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_but_tf32_search_where_the_work_allows_it(recipe):
    before = torch.backends.cudnn.benchmark
    for allowed in (True, False):
        with precision(RECIPES[recipe], benchmark=allowed):
            assert torch.backends.cudnn.benchmark == (allowed and recipe != "tf32")
    assert torch.backends.cudnn.benchmark == before
