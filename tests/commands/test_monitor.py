"""The live table: drawn at any width, run as a real process on a real pseudo-terminal, and ended by real signals."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from pytest_gpufleet.model.facts import READINGS
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.sample import Sample
from pytest_gpufleet.report.terminal.gpu_table import table
from pytest_gpufleet.report.terminal.live_table import LiveTable
from pytest_gpufleet.report.terminal.running_check import RunningCheck
from tests.conftest import RECORDED, ROOT, as_on_a_terminal

DEADLINE = 60
READING = {
    "utilization_percent": 97,
    "memory_used_bytes": 113 << 30,
    "temperature_c": 61,
    "memory_temperature_c": 72,
    "power_watts": 655.4,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 3201,
    "clock_event_reasons": 4,
    "pcie_transmitted_kilobytes_per_second": 12,
    "pcie_received_kilobytes_per_second": 34,
}
KNOWN = {"name": "NVIDIA H200", "memory_bytes": 150754820096, "power_limit_watts": 700.0}
# A machine with 8 GPUs, of which the last one does not answer, in place of this one.
STAND_IN = f"""
import sys
from contextlib import contextmanager
from pytest_gpufleet.hardware import local_node, nvml
from pytest_gpufleet.model.gpu import Gpu, GpuTopology

class StandIn:
    def count(self):
        return 8
    def ask(self, index, fact):
        if index == 7:
            raise nvml.FactError("NVML: GPU is lost", applicable=True)
        return {READING!r}[fact]

@contextmanager
def opened():
    gpus = tuple(Gpu(n, {KNOWN!r} | {{"uuid": f"GPU-{{n}}"}}) for n in range(8))
    yield local_node.LocalNode(StandIn(), GpuTopology(gpus=gpus, driver="580.159.04"))

local_node.opened = opened
"""
MONITOR = STAND_IN + "from pytest_gpufleet import cli; sys.exit(cli.main())"


def machine(count: int = 8) -> GpuTopology:
    gpus = (Gpu(n, KNOWN | {"uuid": f"GPU-{n}"}) for n in range(count))
    return GpuTopology(gpus=tuple(gpus), driver="580.159.04")


def lines(width: int, *, ascii_only: bool = False, running: str = "", **changes: object) -> list[str]:
    gpus = [dict(READING) for _ in range(8)]
    gpus[1] |= changes
    sample = Sample(1795166043.0, tuple(gpus))
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(table(sample, [sample] * 90, machine(), running, width, ascii_only))
    return capture.get().rstrip("\n").split("\n")


# ---------------------------------------------------------------- the drawing


def test_shows_what_a_gpu_does_in_80_columns() -> None:
    drawn = lines(80, running="acceptance/test_7_training.py::test_throughput[b]")
    assert "8 x NVIDIA H200" in drawn[0]
    assert "driver 580.159.04" in drawn[0]
    assert drawn[4].split() == [
        *("1", "████▉", "97", "████", "113/140", "61/72", "655/700", "1980", "sw", "power", "cap", "██████████"),
    ]
    assert drawn[-1].rstrip() == "running: acceptance/test_7_training.py::test_throughput[b]"


@pytest.mark.parametrize("width", [1, 5, 20, 40, 60, 79, 80, 81, 100, 120, 200, 300])
def test_fits_any_width_in_the_same_number_of_lines(width: int) -> None:
    drawn = lines(width, running="acceptance/" + "x" * 400, clock_event_reasons=0x1FF)
    assert len(drawn) == 8 + 4
    assert max(cell_len(line) for line in drawn) <= width


def test_columns_are_left_out_by_their_importance() -> None:
    headings = {width: " ".join(lines(width)[1:3]) for width in (20, 52, 80, 120)}
    assert ["Model" in headings[width] for width in headings] == [False, False, False, True]
    assert ["history" in headings[width] for width in headings] == [False, False, True, True]
    assert ["SM" in headings[width] for width in headings] == [False, True, True, True]
    assert all("GPU" in heading and "Load" in heading for heading in headings.values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory_temperature_c": None}, "61/n/a"),
        ({"power_watts": None, "clock_event_reasons": None}, "n/a     1980  n/a"),
        ({"clock_event_reasons": 0}, "none"),
        ({"clock_event_reasons": 0x48 | 0x4}, "hw thermal slowdow…"),
        (dict.fromkeys(READING), "does not answer"),
    ],
)
def test_what_cannot_be_had_and_what_is_wrong(changes: dict[str, object], expected: str) -> None:
    assert expected in lines(80, **changes)[4]


def test_a_console_that_knows_ascii_only() -> None:
    drawn = lines(80, ascii_only=True, running="test_é"[:5], clock_event_reasons=0x48)
    "\n".join(drawn).encode("ascii")
    assert "#####" in drawn[3]


# ---------------------------------------------------------------- which check a run is at


def write(path: Path, *events: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        for event in events:
            file.write(json.dumps({"t": "2026-11-21T00:00:00", **event}) + "\n")


def started(name: str) -> dict[str, object]:
    return {"event": "check_started", "check": name}


def finished(name: str) -> dict[str, object]:
    return {"event": "check_finished", "check": {"id": name, "outcome": "passed"}}


def test_running_check_is_followed_until_the_verdict(tmp_path: Path) -> None:
    evidence, running = tmp_path / "host-1" / "evidence.jsonl", RunningCheck(tmp_path)
    assert running() == ""
    write(evidence, {"event": "run"}, started("a"))
    assert running() == "a"
    write(evidence, {"event": "telemetry", "gpus": []}, finished("a"))
    assert running() == ""
    with evidence.open("a") as file:
        line = json.dumps({"t": "", **started("b")})
        file.write(line[:20])
        file.flush()
        assert running() == ""  # half a line
        file.write(line[20:] + "\n")
    assert running() == "b"
    newer = tmp_path / "host-2" / "evidence.jsonl"
    write(newer, started("c"))
    os.utime(evidence, (time.time() - 60,) * 2)
    assert running() == "c"
    write(newer, {"event": "verdict", "verdict": "REJECTED", "reasons": []})
    assert running() == ""


def test_running_check_with_progress(tmp_path: Path) -> None:
    evidence, running = tmp_path / "host-1" / "evidence.jsonl", RunningCheck(tmp_path)
    progress = {"event": "progress", "check": "x.py::test_a", "done": 150, "of": 600, "doing": "training"}
    write(evidence, started("x.py::test_a"), progress)
    assert running() == "test_a ███░░░░░░░░░ 2 min 30 s of 10 min 0 s, 7 min 30 s left: training"
    write(evidence, {"event": "check_finished"})
    assert running() == ""


def test_a_new_run_begins_without_the_progress_of_the_one_before(tmp_path: Path) -> None:
    evidence, running = tmp_path / "host-1" / "evidence.jsonl", RunningCheck(tmp_path)
    progress = {"event": "progress", "check": "x.py::test_a", "done": 150, "of": 600, "doing": "training"}
    write(evidence, started("x.py::test_a"), progress)
    assert running().endswith("training")
    os.utime(evidence, (time.time() - 60,) * 2)
    write(tmp_path / "host-2" / "evidence.jsonl", {"event": "run"})
    assert running() == ""


def test_running_check_of_an_old_or_removed_run(tmp_path: Path) -> None:
    evidence, running = tmp_path / "host-1" / "evidence.jsonl", RunningCheck(tmp_path)
    write(evidence, started("a"))
    assert running() == "a"
    os.utime(evidence, (time.time() - 3700,) * 2)
    assert running() == ""
    shutil.rmtree(evidence.parent)
    assert running() == ""


def test_running_check_in_a_folder_of_somebody_else(tmp_path: Path) -> None:
    evidence, running = tmp_path / "host-1" / "evidence.jsonl", RunningCheck(tmp_path)
    write(evidence, started("a\x1b]0;b\n"))
    assert running() == "a]0;b"  # nothing that a terminal would obey
    evidence.rename(tmp_path / "elsewhere")
    evidence.symlink_to(tmp_path / "elsewhere")
    assert running() == ""
    evidence.unlink()
    os.mkfifo(evidence)
    assert running() == ""


# ---------------------------------------------------------------- the command


def environment(**changes: str) -> dict[str, str]:
    taken_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in taken_out}
    return {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **changes}


def monitor(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MONITOR, "monitor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment(**changes))


def test_once_without_a_terminal_prints_one_plain_table() -> None:
    done = monitor("--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("GPU/mem") == 1
    assert done.stdout.count("655/700") == 7
    assert max(map(cell_len, done.stdout.split("\n"))) <= 80
    assert "does not answer" in done.stdout
    assert "655/700" in monitor("--once", PYTHONIOENCODING="ascii").stdout


def test_json_and_csv(tmp_path: Path) -> None:
    file = tmp_path / "gpus.csv"
    write(tmp_path / "run" / "evidence.jsonl", started("test_a"))
    for _ in range(2):
        done = monitor("--once", "--json", "--csv", str(file), "--fleet-dir", str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["running"] == "test_a"
    assert [gpu["gpu"] for gpu in document["gpus"]] == [f"gpu{index}" for index in range(8)]
    assert {name: document["gpus"][0][name] for name in READINGS} == READING
    assert document["gpus"][0]["clock_event_reasons_in_words"] == ["sw power cap"]
    assert document["gpus"][7]["power_watts"] is None
    rows = list(csv.DictReader(file.open(newline="")))
    assert len(rows) == 16, "appended, with one header"
    assert [(row["gpu"], row["power_watts"]) for row in (rows[8], rows[15])] == [("gpu0", "655.4"), ("gpu7", "")]


def test_json_goes_on_line_by_line_until_the_reader_leaves() -> None:
    command = [sys.executable, "-c", MONITOR, "monitor", "--json", "--interval", "0.05"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        times = [json.loads(process.stdout.readline())["time"] for _ in range(3)]
        process.stdout.close()
        assert process.wait(DEADLINE) == 0
        assert process.stderr.read() == ""
    assert sorted(set(times)) == times


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["monitor", "--csv", "/no/x.csv"], 1, "gpufleet: /no/x.csv cannot be written: No such file or directory\n"),
        (["monitor", "--interval", "0"], 2, "'0' is not a number of seconds above 0\n"),
        ([], 2, "the following arguments are required: COMMAND\n"),
    ],
    ids=["csv", "interval", "nothing"],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: list[str], status: int, said: str) -> None:
    command = [sys.executable, "-c", MONITOR, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment())
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr


def test_no_gpu_is_one_sentence() -> None:
    command = [sys.executable, "-m", "pytest_gpufleet", "monitor"]
    hidden = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=hidden)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpufleet: ")
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------- on a terminal


class Terminal:
    """A pseudo-terminal with a process on it, and all that was written to it."""

    def __init__(self, code: str, *arguments: str, columns: int = 80, rows: int = 24, **changes: str) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=slave, stdout=slave, stderr=slave,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=as_on_a_terminal,
        )  # fmt: skip
        os.close(slave)

    def until(self, wanted: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while wanted not in self.text:
            assert time.monotonic() < deadline, f"{wanted!r} never came: {self.text!r}"
            assert self._read(deadline), f"{wanted!r} never came: {self.text!r}"

    def end(self) -> int:
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        os.close(self._master)
        return self.process.wait(DEADLINE)

    def _read(self, deadline: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_by_a_signal_is_clean(number: signal.Signals) -> None:
    terminal = Terminal(MONITOR, "monitor", "--interval", "0.1")
    terminal.until("655/700")
    seen = len(terminal.text)
    terminal.until("no run is on")
    terminal.process.send_signal(number)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l") > 0, "the cursor is back"
    assert terminal.text.rfind("\x1b[?1049l") > terminal.text.rfind("\x1b[?1049h") >= 0, "and the screen as it was"
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text[:seen].replace("\x1b[H", "\n"))
    assert max(cell_len(line) for line in re.split("[\r\n]+", screen)) <= 80


def test_a_terminal_that_can_do_nothing_gets_plain_tables() -> None:
    terminal = Terminal(MONITOR, "monitor", "--interval", "0.1", TERM="dumb")
    terminal.until("655/700")
    terminal.until("no run is on")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "\x1b" not in terminal.text


UNDER_OTHERS = (
    STAND_IN
    + """
import threading
from pytest_gpufleet.hardware.telemetry import Sampler
from pytest_gpufleet.report.terminal.live_table import LiveTable

drawn = threading.Event()
with local_node.opened() as node, LiveTable(node.topology, sys.stdout, lambda: "test_a.py::test_b") as live:
    def show(sample):
        live.show(sample)
        drawn.set()
    sampler = Sampler(node, 0.01, show)
    sampler.start()
    for number in range(40):
        print(f"test_{number}.py ", end="", flush=True)
        drawn.clear()
        drawn.wait()
        print("..F [100%]", flush=True)
    print("half a line", end="", flush=True)
    drawn.clear()
    drawn.wait()
    if sys.argv[1:]:
        input()
    sampler.stop()
print(" and its end")
"""
)


def test_live_gives_the_whole_terminal_back() -> None:
    terminal = Terminal(UNDER_OTHERS)
    assert terminal.end() == 0
    assert "655/700" in terminal.text
    assert "\x1b[1;12r" in terminal.text, "12 of 24 lines scroll while it is on"
    after = terminal.text[terminal.text.rindex("\x1b[r") :]
    assert after.endswith("\x1b8 and its end\r\n")
    assert "655" not in after


def test_pytest_shows_the_table_while_a_test_runs(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a.py").write_text("def test_b():\n    print('hidden')\n    input_file = open('go')\n")
    os.mkfifo(tmp_path / "go")
    code = f"import os; os.chdir({str(tmp_path)!r}); import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    options = ("--gpus=4", "--fleet-dir=runs", "--fleet-monitor", "--fleet-interval=0.1", *RECORDED)
    change = "for gpu in gpus: gpu['power_watts'] = 655.4"
    terminal = Terminal(code, *options, PYTHONPATH=str(ROOT), CHANGE=change)
    terminal.until("running: test_a.py::test_b")
    terminal.until("655")
    (tmp_path / "go").open("w").close()
    terminal.end()
    assert "1 passed" in terminal.text
    assert "hidden" not in terminal.text


@pytest.mark.parametrize("rows", [24, 10], ids=["no terminal", "too small"])
def test_live_writes_nothing_where_it_has_no_place(rows: int) -> None:
    if rows == 24:
        done = subprocess.run([sys.executable, "-c", UNDER_OTHERS], capture_output=True, text=True, timeout=DEADLINE)
        status, text = done.returncode, done.stdout
    else:
        terminal = Terminal(UNDER_OTHERS, rows=rows)
        status, text = terminal.end(), terminal.text.replace("\r\n", "\n")
    assert status == 0
    assert text == "".join(f"test_{number}.py ..F [100%]\n" for number in range(40)) + "half a line and its end\n"


def test_live_stays_silent_after_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveTable(machine(), sys.stdout) as live:
        pass
    live.show(Sample(0.0, (dict(READING),) * 8))
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux, a terminal that can be read, is not installed")
def test_live_leaves_what_others_write_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "others.py"
    script.write_text(UNDER_OTHERS)

    def tmux(*arguments: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *arguments]
        utf8 = environment(LC_ALL="C.UTF-8")
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=utf8).stdout

    def screen_with(*wanted: str) -> list[str]:
        deadline = time.monotonic() + DEADLINE
        while True:
            screen = tmux("capture-pane", "-p", "-t", "t", "-S", "-100")
            if all(text in screen for text in wanted) or time.monotonic() > deadline:
                return screen.rstrip("\n").split("\n")

    others = [f"test_{number}.py ..F [100%]" for number in range(40)]
    tmux("new-session", "-d", "-s", "t", "-x", "80", "-y", "24", "bash", "--norc")
    try:
        tmux("send-keys", "-t", "t", f"PS1= ; clear; {sys.executable} {script} wait", "Enter")
        during = screen_with("half a line", "running: test_a.py::test_b")
        tmux("send-keys", "-t", "t", "Enter")
        after = screen_with("and its end")
    finally:
        tmux("kill-server")
    top = during.index(others[0])
    assert during[top : top + 41] == [*others, "half a line"]
    assert during[-1] == "running: test_a.py::test_b"
    assert sum("655/700" in line for line in during) == 7, "one table, at the bottom"
    assert [line for line in after if line.startswith("test_")] == others
    assert not any("655/700" in line for line in after)
