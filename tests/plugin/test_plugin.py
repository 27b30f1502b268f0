"""Options, markers and fixtures, as somebody meets them on the command line."""

import json
import shlex
import signal
from argparse import ArgumentTypeError
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pytest

from pytest_gpufleet import Gpu, GpuTopology
from pytest_gpufleet.model.levels import LEVELS
from pytest_gpufleet.plugin import options
from pytest_gpufleet.plugin.markers import lacking
from pytest_gpufleet.run.run import OF_TRAINING
from pytest_gpufleet.run.settings import OPTIONS
from tests import runs
from tests.conftest import RECORDED, REPORTS
from tests.machines import first_gpus

PROFILE = 'name = "Card"\nmatch = ["NVIDIA Card"]\n[[limit]]\n'
LIMIT = f'{PROFILE}metric = "busbw"\nmin = 1\nunit = "GB/s"\ngrade = "published"\nsource = "somebody"\n'
TRIVIAL = "def test_nothing(): pass"
LISTED = """
    import pytest

    def test_alone(world): pass
"""


@pytest.mark.parametrize(("option", "words"), [
    ("--help", ["--gpus=N|all|auto", "--rehearse", "--fleet-level={quick,standard,burnin}", "--fleet-dir=DIR"]),
    ("--markers", ["pytest.mark.spmd:", "level(name):", "fresh_world:"]),
    ("--fixtures", ["gpu_topology", "world ", "nccl_group", "rank ", "judge"]),
    ("--setup-plan", ["SETUP    S world", "test_inner.py::test_alone"]),
])  # fmt: skip
def test_pytest_explains_and_makes_no_run(run_pytest, option, words):
    run = run_pytest(option, "--rehearse=2", f"--fleet-dir={REPORTS}", files={"test_inner.py": LISTED})
    assert run.status == 0
    assert [word for word in words if word not in run.text] == []
    assert [word for word in ("REHEARSAL", "= gpufleet =") if word in run.text] == []
    assert run.folders == []


def test_options_that_only_list_are_pytests_own(pytestconfig):
    names = {*options.LISTINGS} - {"cacheshow"}  # that is not there with no:cacheprovider
    assert not any(map(pytestconfig.getoption, names))


def test_what_is_no_value_of_an_option_is_refused():
    read = {option.flag: option.read for option in OPTIONS.values()}
    for flag, text, words in (
        ("--gpus", "٣", "'٣'"), ("--rehearse", "two", "'two'"), ("--nodes", "0", "'0'"), ("--fleet-timeout", "0", "0"),
        ("--fleet-interval", "11", "'11'.* 10 seconds"), ("--fleet-level", "turbo", "'turbo' is not a level"),
        ("--fleet-keep", "1e3", "'1e3' is not a whole number"),
        ("--fleet-note", "4711", "4711.*write KEY=VALUE"), ("--fleet-note", "order=", "order=.*write KEY=VALUE"),
        ("--fleet-basis", "best", "'best' is not a grade of limits"),
        *(("--fleet-network", wrong, f"'{wrong}' is not the network rate") for wrong in ("fast", "0", "nan")),
        ("--fleet-without", "bmc,bios", "'bios' is no subject of the host; choose from acs, bmc, cabling, dcgm"),
        *(("--fleet-webhook", url, "not an http or https address")
          for url in ("file:///etc/passwd", "ftp://host/x", "host:80", "https://")),
        *(("--fleet-burn-in", text, "is not a duration: write a whole number and s, m, h or d, like 15m or")
          for text in ("", "15", "m", "0m", "1.5h", "-3m", "15 m", "15w")),
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=words):
            read[flag](text)


@pytest.mark.parametrize(("arguments", "words"), [
    ("--gpus 0", ["--gpus", "'0'"]),
    ("--gpus 0,1", ["--gpus", "'0,1'", "CUDA_VISIBLE_DEVICES"]),
    ("--rehearse 3", ["--rehearse 3", "--rehearse=N"]),
    ("--gpus 8 --rehearse", ["--gpus N", "--rehearse", "give one of them"]),
    ("--gpus 1 --fleet-address head:6379", ["--fleet-address", "--nodes N"]),
    ("--gpus 1 --fleet-insecure", ["--fleet-insecure", "--nodes N"]),
    ("--rehearse --fleet-burn-in=2h --fleet-level=quick", ["--fleet-burn-in is part of level burnin", "quick was"]),
    ("--rehearse --resnet-model=resnet34", ["--resnet-model: invalid choice: 'resnet34'"]),
    ("--rehearse --resnet-batch=1e3", ["--resnet-batch: '1e3' is not a whole number, 1 or more"]),
    ("--rehearse --fleet-returns=x --fleet-level=quick", ["--fleet-returns has the level of the run before"]),
    ("--rehearse --fleet-returns=x --nodes=2", ["--fleet-returns is about one machine"]),
    ("--rehearse --fleet-replaced=gpu3", ["give the run before with --fleet-returns DIR"]),
    ("--pyargs pytest_gpufleet", ["pytest_gpufleet.acceptance"]),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(asked, arguments, words):
    with pytest.raises(pytest.UsageError) as refused:
        asked(*shlex.split(arguments))
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize("arguments", ["--rehearse", "--gpus all", "--rehearse --nodes 2"])
def test_no_run_is_made_once_for_each_gpu(asked, monkeypatch, arguments):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pytest.UsageError, match=r"torchrun starts pytest several times.*--nodes"):
        asked(*shlex.split(arguments))
    assert asked(*shlex.split(arguments), "--collect-only").listing


def test_a_python_that_leaves_out_assertions_makes_no_run_and_runs_what_is_not_ours(asked, monkeypatch):
    monkeypatch.setattr(options, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=1)))
    assert not asked().asked
    with pytest.raises(pytest.UsageError, match="python -O"):
        asked("--rehearse")


BAD_FILES = {
    "test_inner.py": TRIVIAL,
    "file": "",
    "all": "",
    "broken.toml": "name = broken",
    "unit.toml": LIMIT.replace("GB/s", "parsecs"),
    "bad_order.toml": 'name = "Mine"\n[gpus]\nnvlink = 18\n',
    "twice.toml": LIMIT + LIMIT.removeprefix(PROFILE.removesuffix("[[limit]]\n")),
}


@pytest.mark.parametrize(("arguments", "words"), [
    ("--rehearse=two", ["--rehearse", "'two'", "as in --rehearse=4"]),
    ("--nodes all --rehearse", ["--nodes all", "--nodes N"]),
    ("--rehearse --fleet-profile missing.toml", ["missing.toml", "cannot be read"]),
    ("--rehearse --fleet-profile broken.toml", ["broken.toml", "not valid TOML", "line 1"]),
    ("--rehearse --fleet-profile unit.toml", ["unit.toml", "limit 1", '"unit"', '"parsecs"']),
    ("--rehearse --fleet-profile twice.toml", ["twice.toml", "limit 1", "limit 2", "more specific"]),
    ("--rehearse --fleet-order bad_order.toml", ["bad_order.toml:3", 'unknown key "nvlink"', '"nvlinks"?']),
    ("--rehearse --fleet-prometheus=broken.toml", ["broken.toml", "is no textfile of an earlier run"]),
    ("--rehearse --fleet-dir=file", ["file", "cannot be written", "--fleet-dir"]),
    ("--rehearse --html=.", ["--html", "cannot be written: it is a folder"]),
])  # fmt: skip
def test_bad_input_ends_with_one_sentence_before_anything_starts(run_pytest, arguments, words):
    run = run_pytest(f"--fleet-dir={REPORTS}", *shlex.split(arguments), files=BAD_FILES)
    (error,) = (line for line in run.text.splitlines() if all(word in line for word in words))
    assert "error: " in error.lower()
    assert (run.status, run.folders) == (pytest.ExitCode.USAGE_ERROR, [])
    assert [word for word in ("Traceback", "INTERNALERROR", "test session starts") if word in run.text] == []


@pytest.mark.parametrize(("gpus", "hidden"), [(2, True), (4, False)])
def test_gpus_that_are_left_out_are_reported(run_pytest, gpus, hidden):
    options = (f"--gpus={gpus}", f"--fleet-dir={REPORTS}", *RECORDED)
    run = run_pytest(*options, files={"test_inner.py": TRIVIAL})
    assert ("2x NVIDIA H200 of the machine's 4 GPUs, level standard" in run.text) == hidden
    assert run.record.run.gpus_present == 4
    reason = "2 of the machine's 4 GPUs were tested"
    assert (reason in run.record.reasons) == hidden
    assert (f"{reason}." in unescape((run.folders[0] / "report.html").read_text())) == hidden


@pytest.mark.parametrize(("module", "status", "verdict", "reason"), [
    ("def test_count(gpu_topology): assert len(gpu_topology.gpus) == 99", 1, "REJECTED", "test_count"),
    ("", pytest.ExitCode.NO_TESTS_COLLECTED, "INCOMPLETE", "no test was selected"),
], ids=["more GPUs than there are: on those present", "no tests"])  # fmt: skip
def test_a_run_that_accepts_nothing(run_pytest, module, status, verdict, reason):
    run = run_pytest("--gpus", "99", f"--fleet-dir={REPORTS}", files={"test_inner.py": module})
    assert (run.status, run.record.verdict) == (status, verdict)
    assert any(reason in each for each in run.record.reasons)


# A plugin that tells of each fork server what it was to import when idle, and how it ended with the session.
SERVERS = """
import json
from pathlib import Path
from pytest_gpufleet.world.engines import local

servers = []

class Seen(local.Forkserver):
    def __init__(self, preload, idle=()):
        super().__init__(preload, idle)
        servers.append((self, idle))

local.Forkserver = Seen

def tell():
    Path("servers.json").write_text(json.dumps([(idle, server.exitcode()) for server, idle in servers]))

def pytest_load_initial_conftests(early_config):
    early_config.add_cleanup(tell)  # the first to be added is the last to be called
"""


@pytest.mark.parametrize(("given", "likely"), [("-q", OF_TRAINING), ("--fleet-level=quick", ()), ("--co", None)])
def test_ranks_are_got_ready_for_a_run_and_nothing_of_them_is_left(fleet, given, likely):
    run = fleet("", "-p", "servers", given, files={"servers.py": SERVERS})
    servers = json.loads((run.root / "servers.json").read_text())
    assert servers == ([] if likely is None else [[list(likely), -signal.SIGKILL]])


def test_plain_run_imports_nothing_heavy_and_keeps_its_order(run_fresh):
    rooms = (f"pytest_gpufleet.{room}" for room in ("machine", "world", "probes", "verdict", "nodes", "report"))
    heavy = ("msgspec", "torch", "matplotlib", "ray", "cloudpickle", "pynvml", "numpy", "jinja2", *rooms)
    module = f"""
        import sys

        import pytest

        @pytest.mark.at_the_end
        def test_first():
            pass

        @pytest.mark.spmd
        @pytest.mark.fresh_world
        def test_modules():
            assert [name for name in {heavy} if name in sys.modules] == []
    """
    # pytest-html brings jinja2 itself.
    run = run_fresh("-v", "-p", "no:html", files={"test_inner.py": module})
    assert run.status == 0, run.text
    assert run.text.index("test_first ") < run.text.index("test_modules ")
    assert "gpufleet:" not in run.text


def test_plain_run_may_use_the_world_says_first_that_it_is_a_rehearsal_and_makes_no_report(run_pytest):
    module = """
        import pytest

        def test_world(world):
            assert world.run(lambda rank: rank.index) == list(range(world.size))

        @pytest.mark.spmd
        def test_spmd(rank):
            assert rank.index < rank.size
    """
    run = run_pytest(files={"test_inner.py": module})
    assert run.status == 0, run.text
    assert "2 passed" in run.text
    assert 0 < run.text.find("REHEARSAL on 2 CPU ranks") < run.text.find("test_inner.py ."), run.text
    assert (run.text.count("REHEARSAL"), run.folders) == (1, [])
    left = {path.name for path in run.root.iterdir() if path.suffix or path.name == "reports"}
    assert left == {"pytest.ini", "test_inner.py"}


def test_n_auto_runs_serially(fleet):
    run = fleet("def test_serial(pytestconfig): assert not hasattr(pytestconfig, 'workerinput')", "-n", "auto")
    assert (run.status, run.outcomes) == (0, {"test_serial": "passed"}), run.text


def test_level_selects_itself_and_those_below(fleet):
    marked = [f"@pytest.mark.level('{each}')\ndef test_{each}(): pass" for each in LEVELS]
    module = "\n".join(["import pytest", "def test_unmarked(): pass", *marked])
    run = fleet(module, "--fleet-level=standard", "-k", "not unmarked")
    assert list(run.outcomes) == ["test_quick", "test_standard"]
    # What is above the level is not missing.
    assert [name.rsplit("::", 1)[-1] for name in run.record.deselected] == ["test_unmarked"]


def test_bad_level_is_a_usage_error_that_names_the_test(fleet):
    run = fleet("import pytest\n@pytest.mark.level('quick', 'turbo')\ndef test_levelled(): pass")
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert "test_inner.py::test_levelled: level() takes one of quick, standard, burnin" in run.text
    assert "Traceback" not in run.text
    assert_nothing_was_tested(run)


def test_a_path_that_does_not_exist_gives_no_verdict_on_the_terminal(run_pytest):
    run = run_pytest("nowhere", "--gpus=4", f"--fleet-dir={REPORTS}", *RECORDED, files={"test_inner.py": TRIVIAL})
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert "file or directory not found: nowhere" in run.text
    assert_nothing_was_tested(run)


def assert_nothing_was_tested(run):
    assert "nothing was tested" in run.text
    assert not any(line in ("REHEARSAL", "INCOMPLETE") for line in run.text.splitlines())
    assert "report" not in run.text
    assert run.folders == []


NO_GPU = """
    from pytest_gpufleet.machine import local_node
    from pytest_gpufleet.machine.nvml import NoGpus

    def nothing(wanted):
        raise NoGpus("the driver sleeps")

    local_node.opened = nothing
"""
NEEDS_GPUS = "\n".join(f"def test_{name}(world): pass" for name in "abc")


def test_no_gpu_is_reported_first_and_its_consequences_once(run_pytest):
    other = NEEDS_GPUS + "\ndef test_fails(): assert 0"
    files = {"test_inner.py": NEEDS_GPUS, "test_other.py": other, "off.py": NO_GPU}
    run = run_pytest("--gpus=8", f"--fleet-dir={REPORTS}", "-p", "off", files=files, PYTHONPATH=".")
    assert run.status == 1
    ours = run.text.partition("= gpufleet =")[2].partition("\nreport: ")[0]
    page = unescape((run.folders[0] / "report.html").read_text())
    for text in (" ".join(ours.split()), page):
        assert "No GPU is here: the driver sleeps. 2 of 7 checks failed." in text
        assert "No single GPU is named" not in text
    assert run.outcomes == {**dict.fromkeys(("test_a", "test_b", "test_c"), "skipped"), "test_fails": "failed"}
    assert page.count('<article class="fleet-failure"') == 2


def test_a_failure_that_was_expected_and_did_not_come_is_reported_as_such(fleet):
    expected = "@pytest.mark.xfail(strict=True, reason='it has to fail')"
    run = fleet(f"import pytest\n{expected}\ndef test_passes(): pass\n")
    assert run.outcomes == {"test_passes": "failed"}
    assert [fault.what for fault in run.record.faults] == ["[XPASS(strict)] it has to fail"]


OWN = """
import pytest

@pytest.mark.spmd
def test_raises(rank):
    \"\"\"A check of mine\"\"\"
    raise ValueError(f"the needle of rank {rank.index}")
"""


@pytest.mark.parametrize(("options", "times"), [((), 1), (("-rf",), 2), (("--tb=no",), 1)])
def test_a_failure_is_shown_once(run_pytest, options, times):
    run = run_pytest("--rehearse=1", "--fleet-dir=runs", *options, files={"test_inner.py": OWN})
    assert (run.status, run.text.count("rank 0 of 1, CPU: raised ValueError: the ")) == (1, times), run.text
    assert "A check of mine" in run.text
    assert "the needle of rank 0" in (run.folders[0] / "report.txt").read_text()


def test_a_site_says_in_its_ini_file_what_runs_are_made_of(run_pytest):
    files = {"pytest.ini": "[pytest]\ngpus = 4\nfleet_level = quick\n", "test_inner.py": "def test_it(): pass"}
    run = run_pytest("--fleet-dir=runs", *RECORDED, files=files)
    assert (run.record.run.gpus, run.record.run.level) == ("4", "quick")
    rehearsed = run_pytest("--rehearse=1", "--fleet-dir=runs", files=files).record.run
    assert (rehearsed.rehearsal, rehearsed.level) == (True, "quick")


REHEARSAL = GpuTopology(), 2, 1


def gpus(count, capability=(9, 0)):
    topology = first_gpus(runs.topology("node7", runs.H200), count)
    able = tuple(Gpu(gpu.index, {**gpu.facts, "compute_capability": capability}) for gpu in topology.gpus)
    return replace(topology, gpus=able), count, 1


@pytest.mark.parametrize(("here", "needs", "words"), [
    (REHEARSAL, {"gpus": True}, "a rehearsal has no GPUs"),
    (REHEARSAL, {"ranks": 4}, "needs 4 ranks, this run has 2"),
    (REHEARSAL, {"ranks": 2, "capability": (8, 0)}, ""),
    (gpus(1), {"gpus": True}, ""),
    (gpus(1), {"ranks": 2}, "needs 2 ranks, this run has 1"),
    (gpus(2), {"ranks": 2, "capability": (9, 0)}, ""),
    (gpus(2, (7, 5)), {"capability": (8, 0)}, "needs compute capability 8.0, GPU 0 has 7.5"),
    (gpus(2, None), {"capability": (8, 0)}, ""),
    (REHEARSAL, {"nodes": 2}, "needs 2 nodes, this run has 1"),
    ((GpuTopology(), 6, 3), {"nodes": 3, "ranks": 6}, ""),
])  # fmt: skip
def test_what_is_lacking(here, needs, words):
    assert lacking(*here, **needs) == words
