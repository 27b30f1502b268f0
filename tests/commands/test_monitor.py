"""The live table: drawn at any width, and run as a real process on a real pseudo-terminal, ended by real signals."""

import fcntl
import io
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pytest_gpufleet.machine.gpu_facts import READINGS
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import Gpu, GpuTopology
from pytest_gpufleet.report.terminal.live import AROUND, running_check, table
from tests.conftest import RECORDED, ROOT, SECONDS as DEADLINE, as_on_a_terminal

READING = dict(zip(READINGS, (97, 113 << 30, 61, 72, 655.4, 1980, 3201, 4), strict=True))
KNOWN = {"name": "NVIDIA H200", "memory_bytes": 150754820096, "power_limit_watts": 700.0}
# A recorded machine with 4 GPUs, of which the last one does not answer, in place of this one.
CHANGE = f"""
for gpu in gpus:
    gpu.update({READING!r})
gpus[3].update(dict.fromkeys({[*READING]!r}, Missing("NVML: GPU is lost")))
"""
MONITOR = "import sys, tests.machine.recorded; from pytest_gpufleet import cli; sys.exit(cli.main())"


def drawn(width, running="", **changes):
    gpus = tuple(Gpu(n, KNOWN) for n in range(8))
    sample = Sample(1795166043.0, ({**READING, **changes}, *[READING] * 7))
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(table(sample, GpuTopology(gpus=gpus, driver="580.159.04"), running))
    return capture.get().rstrip("\n").split("\n")


def test_shows_what_a_gpu_does_in_80_columns():
    lines = drawn(80, "acceptance/test_7_training.py::test_throughput[b]")
    assert "8 x NVIDIA H200, driver 580.159.04" in lines[0]
    assert lines[4].split() == ["1", "97", "113/140", "61", "72", "655/700", "1980", "sw", "power", "cap"]
    assert lines[-1].rstrip() == "running: acceptance/test_7_training.py::test_throughput[b]"
    "\n".join(lines).encode("ascii")  # many a serial console knows nothing else


@pytest.mark.parametrize("width", [20, 60, 80, 300])
def test_fits_any_width_in_the_same_number_of_lines(width):
    lines = drawn(width, "acceptance/" + "x" * 400, clock_event_reasons=0x1FF)
    assert len(lines) == 8 + AROUND
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize(("changes", "expected"), [
    ({"power_watts": None, "clock_event_reasons": None}, ["72", "n/a", "1980", "n/a"]),
    ({"clock_event_reasons": 0}, ["none"]),
    (dict.fromkeys(READING), ["does", "not", "answer"]),
])  # fmt: skip
def test_what_cannot_be_had_and_what_is_wrong(changes, expected):
    assert drawn(80, **changes)[3].split()[-len(expected) :] == expected


def write(path, *events):
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines((each if isinstance(each, str) else json.dumps({"t": "", **each})) + "\n" for each in events)


def started(name):
    return {"event": "check_started", "check": name}


PROGRESS = {"event": "progress", "check": "x.py::b", "done": 150, "of": 600.0, "doing": "training"}


@pytest.mark.parametrize(("events", "running"), [
    ([{"event": "run"}], ""),
    ([started("a"), {"event": "telemetry", "gpus": []}], "a"),
    ([started("a"), {"event": "check_finished"}, {"event": "telemetry"}], ""),
    ([started("x.py::b"), PROGRESS], "b ###......... 2 min 30 s of 10 min 0 s, 7 min 30 s left: training"),
    ([started("a"), {"event": "verdict", "verdict": "REJECTED", "reasons": []}], ""),
    ([started("a\x1b]0;b\n")], "a]0;b"),  # nothing that a terminal would obey
    (['{"event": "check_started", "check": ' + "[" * 100_000], ""),
])  # fmt: skip
def test_the_running_check_is_the_one_that_the_end_of_the_evidence_names(tmp_path, events, running):
    assert running_check(tmp_path) == ""
    write(tmp_path / "host-1" / "evidence.jsonl", *events)
    assert running_check(tmp_path) == running


def test_only_whole_lines_of_the_newest_run_that_goes_on_count(tmp_path):
    evidence, newer = (tmp_path / name / "evidence.jsonl" for name in ("host-1", "host-2"))
    write(evidence, started("a"))
    with evidence.open("a") as file:
        file.write(json.dumps({"t": "", **started("b")}))  # still being written
    assert running_check(tmp_path) == "a"
    os.utime(evidence, (time.time() - 60,) * 2)
    write(newer, started("c"))
    assert running_check(tmp_path) == "c"
    newer.rename(tmp_path / "elsewhere")
    newer.symlink_to(tmp_path / "elsewhere")  # no link is followed (tests/run/test_files.py)
    assert running_check(tmp_path) == ""
    newer.unlink()
    os.utime(evidence, (time.time() - 3700,) * 2)
    assert running_check(tmp_path) == ""


def environment(**changes):
    taken_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in taken_out}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    around = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": path, "CHANGE": CHANGE}
    return {**kept, **around, **changes}


@pytest.fixture
def monitor(tmp_path):
    def run(*arguments, **changes):
        command, env = [sys.executable, "-c", MONITOR, *arguments], environment(**changes)
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, env=env)

    return run


def test_once_without_a_terminal_prints_one_plain_table(monitor):
    done = monitor("monitor", "--once", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("655/700") == 3
    assert "does not answer" in done.stdout


def test_json_goes_on_line_by_line_until_the_reader_leaves(tmp_path):
    write(tmp_path / "run" / "evidence.jsonl", started("test_a"))
    command = [sys.executable, "-c", MONITOR, "monitor", "--json", "--interval", "0.05", "--fleet-dir", str(tmp_path)]
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen(command, **how) as process:
        documents = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        assert (process.wait(DEADLINE), process.stderr.read()) == (0, "")
    assert documents[0]["time"] < documents[1]["time"] < documents[2]["time"]
    gpus = documents[0]["gpus"]
    assert (documents[0]["running"], [gpu["gpu"] for gpu in gpus]) == ("test_a", [f"gpu{index}" for index in range(4)])
    assert {name: gpus[0][name] for name in READINGS} == READING
    assert (gpus[0]["clock_event_reasons_in_words"], gpus[3]["power_watts"]) == (["sw power cap"], None)


@pytest.mark.parametrize(("arguments", "status", "words"), [
    ("monitor --interval 0", 2, "'0' is not a number of seconds above 0\n"),
    ("", 2, "Each COMMAND has a --help of its own.\n"),
    ("montior", 2, "'montior' is no command: did you mean monitor?\n"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_sentence(monitor, arguments, status, words):
    done = monitor(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr.endswith(words)) == (status, "", True), done.stderr


class Terminal:
    """A pseudo-terminal of 80 columns with a process on it, and all that was written to it."""

    def __init__(self, folder, code, *arguments, rows=24, **changes):
        self.text = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=folder, stdin=slave, stdout=slave, stderr=slave,
            env=environment(**changes), start_new_session=True, preexec_fn=as_on_a_terminal,
        )  # fmt: skip
        os.close(slave)

    def until(self, wanted=""):
        """Read until this text came, or to the end."""
        deadline = time.monotonic() + DEADLINE
        while not wanted or wanted not in self.text:
            ready = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]
            try:
                data = os.read(self._master, 65536) if ready else b""
            except OSError:  # nobody has the other end any more
                data = b""
            assert data or not wanted, f"{wanted!r} never came: {self.text!r}"
            if not data:
                return
            self.text += data.decode(errors="replace")

    def type(self, text):
        os.write(self._master, text.encode())

    def end(self):
        self.until()
        os.close(self._master)
        return self.process.wait(DEADLINE)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, "xterm"), (signal.SIGTERM, "xterm"), (signal.SIGINT, "dumb")]
)
def test_the_end_by_a_signal_is_clean(tmp_path, number, kind):
    terminal = Terminal(tmp_path, MONITOR, "monitor", "--interval", "0.1", TERM=kind)
    terminal.until("no run is on")
    terminal.process.send_signal(number)
    assert terminal.end() == 0
    assert ("655/700" in terminal.text, "Traceback" in terminal.text) == (True, False)
    if kind == "dumb":  # it gets plain tables
        assert "\x1b" not in terminal.text
    else:
        assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l") > 0, "the cursor is back"
        assert terminal.text.rfind("\x1b[?1049l") > terminal.text.rfind("\x1b[?1049h") >= 0, "and the screen as it was"


PYTEST = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"


def with_the_table(folder, body, *options, rows=24):
    """pytest with --fleet-monitor."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_a.py").write_text(body)
    asked = ("--gpus=4", "--fleet-dir=runs", "--fleet-monitor", "--fleet-interval=0.1", *RECORDED)
    change = "for gpu in gpus: gpu['power_watts'] = 655.4"
    return Terminal(folder, PYTEST, *asked, *options, rows=rows, CHANGE=change)


@pytest.mark.parametrize(("rows", "seen"), [(24, True), (10, False)], ids=["room for it", "too small"])
def test_pytest_shows_the_table_while_a_test_runs(tmp_path, rows, seen):
    body = "def test_a(): pass\ndef test_b():\n    print('hidden')\n    input_file = open('go')\n    assert 1 == 2\n"
    os.mkfifo(tmp_path / "go")
    terminal = with_the_table(tmp_path, body, rows=rows)
    terminal.until("running: test_a.py::test_b" if seen else "test_a.py ")
    if seen:
        terminal.until("655")
    (tmp_path / "go").open("w").close()
    assert terminal.end() == 1
    shown = Text.from_ansi(terminal.text.replace("\r\n", "\n")).plain
    assert [text for text in ("test_a.py .F", "assert 1 == 2", "1 failed, 1 passed") if text not in shown] == []
    assert "Captured stdout" in shown
    assert ("\x1b[?25l" in terminal.text) == seen
    assert terminal.text.rfind("\x1b[?25h") >= terminal.text.rfind("\x1b[?25l"), "the cursor is back"
    assert not seen or "655" not in terminal.text[terminal.text.rindex("\x1b[2K") :], "the table is taken away"


def test_a_debugger_in_this_process_has_the_terminal_to_itself(tmp_path):
    terminal = with_the_table(tmp_path, "def test_a(): breakpoint()\n")
    terminal.until("(Pdb) ")
    assert 0 < terminal.text.index("\x1b[?25h") < terminal.text.index("(Pdb) "), "the cursor is back"
    terminal.type("c\n")
    terminal.end()
    assert "1 passed" in terminal.text
    assert terminal.text.count("PDB set_trace") == 1
    assert "\x1b[2K" not in terminal.text.partition("(Pdb) ")[2]


def test_there_is_no_table_where_tests_write_themselves(tmp_path):
    terminal = with_the_table(tmp_path, "def test_a(): print('seen')\n", "-s")
    terminal.end()
    assert "test_a.py seen" in terminal.text
    assert "\x1b[?25l" not in terminal.text


STRESSED = """
import sys
from rich.text import Text
from pytest_gpufleet.report.terminal import live

live.TURN_SECONDS = 0.0001
with live.Below(sys.stdout, lambda: Text("below 1\\nbelow 2")) as out:
    for number in range(200):
        print(f"line {number}", end="", file=out, flush=True)
        print("", "ends", file=out, flush=True)
"""


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux, a terminal that can be read, is not installed")
def test_no_line_is_lost_that_is_written_while_the_table_is_drawn(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STRESSED)

    def tmux(*arguments):
        command = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *arguments]
        utf8 = environment(LC_ALL="C.UTF-8")
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=utf8).stdout

    wait = "; echo over; exec cat"
    tmux("new-session", "-d", "-s", "t", "-x", "80", "-y", "24", f"{sys.executable} {script}{wait}")
    try:
        deadline = time.monotonic() + DEADLINE
        screen = []
        while "over" not in screen and time.monotonic() < deadline:
            screen = tmux("capture-pane", "-p", "-t", "t", "-S", "-1000").split("\n")
    finally:
        tmux("kill-server")
    assert screen[: screen.index("over") + 1] == [*(f"line {number} ends" for number in range(200)), "over"]
