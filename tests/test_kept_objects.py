"""What is loaded for good, and Python's garbage collector."""

import gc

import pytest

from pytest_gpufleet.kept_objects import kept


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_loaded_is_not_looked_at_again_and_what_follows_is():
    with kept():
        resting = not gc.isenabled()
        loaded = ["loaded"]
    later = ["later"]
    assert resting
    assert gc.isenabled()
    assert [each for each in gc.get_objects() if each is loaded or each is later] == [later]


def test_it_goes_on_after_a_refusal():
    with pytest.raises(ValueError, match="refused"), kept():
        raise ValueError("refused")
    assert gc.isenabled()


def test_where_somebody_has_switched_it_off_it_stays_off():
    gc.disable()
    with kept():
        pass
    assert not gc.isenabled()
