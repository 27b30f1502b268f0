"""The burn-in: load that lasts, ended by the first fault, by its time, or by whoever waits for it."""

import io
import os
import re
import signal
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.metric import GpuState
from pytest_gpufleet.model.place import Gpu, GpuTopology
from pytest_gpufleet.probes import endurance
from pytest_gpufleet.report.terminal import live
from pytest_gpufleet.verdict.judgement import judge, read
from pytest_gpufleet.verdict.profile import for_gpu
from tests.commands.test_monitor import PYTEST, Terminal
from tests.conftest import ACCEPTANCE
from tests.probes.test_compute import FAULT

BURN_IN = f"{ACCEPTANCE / 'test_9_endurance.py'}::test_burn_in"
FOLDER = "--fleet-dir=runs"


def test_a_wrong_bit_ends_it_at_once_and_names_the_rank(planted):
    run = planted(FAULT, "one bit", BURN_IN, "--rehearse", "--fleet-burn-in=60s")
    assert run.status == 1
    (fault,) = run.record.faults
    assert (fault.name, [*map(str, fault.subjects)]) == ("matmul_nondeterministic", ["cpu1"])
    assert fault.what.startswith("wrong elements: 1, in ")
    assert "row 5, column 9 is 0x" in fault.what


def on_a_terminal(folder, lasts, *options, ctrl_c_at=None):
    """Exit status, record and what is printed of a rehearsed burn-in. Ctrl-C comes when that was printed."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    terminal = Terminal(folder, PYTEST, BURN_IN, "--rehearse", f"--fleet-burn-in={lasts}", FOLDER, *options)
    if ctrl_c_at:
        terminal.until(ctrl_c_at)
        os.killpg(terminal.process.pid, signal.SIGINT)
    status = terminal.end()
    (written,) = (folder / "runs").iterdir()
    assert (written / "report.html").stat().st_size
    assert "INTERNALERROR" not in terminal.text
    return status, read(written / "evidence.jsonl"), terminal.text


def test_a_terminal_shows_how_far_it_is_and_ctrl_c_leaves_a_report_that_says_so(tmp_path):
    status, record, printed = on_a_terminal(tmp_path, "1m", ctrl_c_at=" of 1 min")  # the first turn is over
    assert status == 2, printed
    reasons = "\n".join(record.reasons)
    assert re.search(r"test_burn_in\): did not finish: it came to \d+ s of 60 s without a fault", reasons)


def test_it_lasts_as_long_as_asked_until_corruption_is_as_rare_and_every_load_has_its_turn(tmp_path):
    status, record, printed = on_a_terminal(tmp_path, "3s", "--fleet-corruption-bound=2s")  # of 3 s it were 1.2 s
    assert (status, record.verdict, record.run.level) == (0, "REHEARSAL", "burnin"), printed
    assert " of 5 s" in printed
    assert "interrupted" not in printed
    ((done, whole),) = record.progress.values()
    assert 3 < whole <= done + 1
    metrics = {finding.measurement.metric: finding.measurement for finding in record.findings}
    assert metrics.keys() == {"gemm", "burn_retention", "corruption_bound"}
    assert 2 <= min(metrics["corruption_bound"].values.values()) < 4
    evidence = next((tmp_path / "runs").glob("*/evidence.jsonl")).read_text()
    for load in ("matrix products", "all_reduce", "memory patterns", "training"):
        assert f'"doing": "{load}"' in evidence


@pytest.mark.parametrize("drawn", [False, True])
def test_a_terminal_shows_how_far_it_is_by_lines_or_by_the_table(drawn):
    stream = io.StringIO()
    stream.isatty = lambda: True
    show = live.teller(stream, 900.0, lambda: drawn)
    for second in range(0, 200, 5):
        show(second, None)
    lines = [line.partition(" of 15 min")[0].strip() for line in stream.getvalue().splitlines() if line]
    assert lines == ([] if drawn else ["< 0.1 s", "1 min 0 s", "2 min 0 s", "3 min 0 s"])


GPU = Gpu(0, {"power_limit_watts": 700.0})


def state_of(figure):
    return judge(figure, for_gpu("NVIDIA H200"), GpuTopology((GPU,), (("X",),)), "a check", rehearsal=False).state


@pytest.mark.parametrize(("watts", "state"), [([*[300.0] * 20, 525.0], "missed"), ([*[690.0] * 20, 300.0], "met")])
def test_a_spike_of_power_does_not_make_up_for_a_light_load(watts, state):
    """In turns of matmuls, each with the median of its samples."""
    (power,) = endurance._power("burn_power", SimpleNamespace(gpus=[GPU]), {GPU.place: watts})
    assert state_of(power) == state


@pytest.mark.parametrize("state", [None, GpuState(), GpuState(power_watts=300.0)], ids=str)
def test_no_power_or_limit_of_it_is_no_figure(state):
    gpu, watts = Gpu(0), endurance._watts([state])
    (power,) = endurance._power("burn_power", SimpleNamespace(gpus=[gpu]), {gpu.place: watts})
    assert not power.values
    assert endurance._power("burn_power", SimpleNamespace(gpus=[]), {gpu.place: watts}) == []  # CPU ranks


# Of 30 turns in 15 minutes, the first ten are over before the GPU is warm.
WARMING = [1.0 - 0.004 * min(turn, 10) for turn in range(30)]


@pytest.mark.parametrize(("rates", "state"), [
    (WARMING, "met"),  # 4 % as it becomes 10 K warmer, as a healthy one does
    ([*WARMING[:20], *(rate - 0.005 * turn for turn, rate in enumerate(WARMING[20:], 1))], "missed"),
    ([1.0] * 2, "met"),
])  # fmt: skip
def test_what_is_kept_is_of_the_rate_of_a_warm_gpu(rates, state):
    assert state_of(endurance._retention("matrix products", {GPU.place: rates}, cold=10)) == state
