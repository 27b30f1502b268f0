"""Warnings and log records of ranks: they are heard as those of any test are."""

import pytest

MODULE = """
    import logging
    import warnings

    import pytest

    class Mine(UserWarning):
        pass

    def deprecated(rank):
        warnings.warn("by a function", DeprecationWarning)

    def test_of_a_function(world):
        with pytest.warns(DeprecationWarning, match="by a function"):
            world.run(deprecated)

    @pytest.mark.spmd
    def test_warns(rank):
        with pytest.warns(UserWarning):
            warnings.warn("expected on the rank")

    @pytest.mark.spmd
    def test_shown(rank):
        warnings.warn("shown once", Mine)

    @pytest.mark.spmd
    @pytest.mark.filterwarnings("ignore:quiet")
    def test_ignored(rank):
        warnings.warn("quiet")

    @pytest.mark.spmd
    @pytest.mark.filterwarnings("error")
    def test_error(rank):
        warnings.warn("an error")

    @pytest.mark.spmd
    def test_logs(rank):
        logging.getLogger("mine").warning("a record")
        logging.getLogger("mine").info("no record")
        assert rank.index == 0

    @pytest.mark.spmd
    def test_logs_more(rank):
        logging.getLogger("mine").info("a detail")
        assert rank.index == 0
"""


@pytest.fixture(scope="module")
def noisy(fleet):
    return fleet(MODULE)


def test_filters_and_warns_work_on_ranks(noisy):
    failed = {name for name, outcome in noisy.outcomes.items() if outcome != "passed"}
    assert failed == {"test_error", "test_logs", "test_logs_more"}
    assert "raised UserWarning: an error" in noisy.check("test_error").message
    # Those that nobody expected are in the summary.
    assert noisy.text.count("Mine: shown once (ranks 0, 1)") == 1
    assert "quiet" not in noisy.text
    assert "expected on the rank" not in noisy.text


def test_records_are_shown_with_the_failure(noisy, fleet):
    message = noisy.check("test_logs").message
    assert "WARNING  mine:test_inner.py:" in message
    assert "a record" in message
    assert "no record" not in message
    assert "a detail" not in noisy.check("test_logs_more").message
    assert "a detail" in fleet(MODULE, "--log-level=INFO", "-k", "logs_more").check("test_logs_more").message
