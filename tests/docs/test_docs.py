"""The documents say what the code does: what is generated is up to date, what is written by hand leaves nothing out."""

import ast
import json
import re
import runpy
import shlex
import subprocess
import zipfile
from glob import glob
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.machine.kernel_log import meanings
from pytest_gpufleet.model import suite
from pytest_gpufleet.model.metric import Measurement, MiB
from pytest_gpufleet.plugin import options
from pytest_gpufleet.run.settings import OPTIONS
from pytest_gpufleet.verdict.profile import for_gpu
from tests.conftest import ACCEPTANCE, ROOT

SOURCES, DOCS = ROOT / "src" / "pytest_gpufleet", ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted(DOCS.rglob("*.md")))


@pytest.fixture(scope="module")
def make_checks():
    return runpy.run_path(str(DOCS / "make_checks.py"))


def test_manifest_of_the_suite_is_up_to_date_and_no_two_checks_have_one_name(make_checks):
    written = suite.SHIPPED.read_text(encoding="utf-8")
    assert written == make_checks["manifest_text"](), f"run `{make_checks['COMMAND']}`"
    names = [name.rpartition("::")[2] for name in suite.shipped().checks]
    assert len(set(names)) == len(names)


def test_every_check_that_judges_says_what_it_leaves(make_checks):
    modules = (ast.parse(path.read_text()) for path in ACCEPTANCE.glob("test_*.py"))
    tests = (each for module in modules for each in module.body if isinstance(each, ast.FunctionDef))
    given = {each.name: {argument.arg for argument in each.args.args} for each in tests}
    judging = {name for name, arguments in given.items() if name.startswith("test_") and "judge" in arguments}
    leaving = {name.partition("::")[2]: each.metrics(True) for name, each in suite.shipped().checks.items()}
    assert {name for name, metrics in leaving.items() if metrics} == judging
    for name, items in make_checks["collected"]().items():
        assert {*make_checks["judged"](items).required} <= {*leaving[name.partition("::")[2]]}, name


def test_readme_leads_to_every_page_and_pages_have_every_option_and_every_command():
    text = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in text] == []
    tables = set(re.findall(r"^\| `(--[a-z-]+)", _page("options"), re.MULTILINE))
    assert {each.flag for each in OPTIONS.values()} - tables == set()
    assert [option for option in options.OF_RESNET if f"`{option}" not in _page("options")] == []
    for name in cli.COMMANDS:
        assert re.search(rf"^    gpufleet {name} .*^## {name}$", _page("commands"), re.MULTILINE | re.DOTALL), name


@pytest.mark.parametrize("page", ["any-launcher.md", "recipes/README.md"])
def test_what_launchers_are_reported_is_bash(page):
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        assert subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        assert not anchor or anchor in _anchors(other), target


def _page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def _anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


BUSBW = {"collective": "all_reduce", "bytes": 64 * MiB, "dtype": "float32", "ranks": 8}
RESNET = {"model": "resnet50", "ranks": 8}
AMP = ("train_throughput", {**RESNET, "recipe": "amp"})
BESIDE = {  # row of docs/earlier-suite.md: GPU model, and what its last columns have limits for
    "A100, NVSwitch": ("NVIDIA A100-SXM4-80GB", [("busbw", BUSBW)]),
    "V100, NVLink": ("Tesla V100-SXM2-32GB", [("busbw", BUSBW)]),
    "A100, 80 GB": ("NVIDIA A100-SXM4-80GB", [("train_throughput", {**RESNET, "recipe": "tf32", "batch": 128}), AMP]),
    "V100, 32 GB": ("Tesla V100-SXM2-32GB", [("train_throughput", {**RESNET, "recipe": "fp32", "batch": 64}), AMP]),
}


@pytest.mark.parametrize("row", BESIDE)
def test_limits_beside_those_of_the_earlier_suite_are_the_shipped_ones(row):
    model, measured = BESIDE[row]
    limits = [for_gpu(model).limit_for(Measurement(metric, {}, conditions)) for metric, conditions in measured]
    (line,) = re.findall(rf"^\| {re.escape(row)} \|.*", (DOCS / "earlier-suite.md").read_text(), re.MULTILINE)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[-len(limits) :] == [f"{limit.value:,g}" if limit else "none" for limit in limits]


def test_messages_in_troubleshooting_are_those_of_the_code():
    known = [parts for path in (*SOURCES.rglob("*.py"), *ACCEPTANCE.glob("*.py")) for parts in _texts(path)]
    known += [[check.title] for check in suite.shipped().checks.values()]
    known += [[meaning] for meaning in meanings().values()]
    known += [[", started"], [", completed"]]  # as torch's flight recorder says it
    quoted = list(_quoted((DOCS / "troubleshooting.md").read_text(encoding="utf-8")))
    assert len(quoted) > 20
    assert {line: words for line in quoted if (words := _unknown_words(line, known))} == {}


def _quoted(page):
    """Every line in a block of text, and what the first cell of a table quotes."""
    for block in re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from (cell for _, cell in re.findall(r"^\| (`+) ?(.+?) ?\1 \|", page, re.MULTILINE))


def _texts(path):
    """The literal parts of every text in a source file, in their order: of f-strings, and of those with {names}."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        whole = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        texts = [text for each in whole for text in re.split(r"\{\w+\}", each) if text]
        if len("".join(texts).strip()) >= 4:
            yield texts


def _unknown_words(line, known):
    """The words of a message that are in none of the texts it can be made of. Capitals and digits are examples."""
    covered = set()
    for parts in (parts for parts in known if all(part in line for part in parts)):
        for found in re.finditer(".*?".join(f"({re.escape(part)})" for part in parts), line):
            for group in range(1, len(parts) + 1):
                covered |= set(range(*found.span(group)))
    return [word[0] for word in re.finditer(r"\b[a-z]{4,}\b", line) if not covered.issuperset(range(*word.span()))]


RESULTS = sorted(path.parent for path in (DOCS / "results").glob("*/evidence.jsonl"))
# By the names.
KINDS = {**dict.fromkeys(("h100", "h200", "nodes"), "ACCEPTED"), "rejected": "REJECTED", "incomplete": "INCOMPLETE"}
MOST_BYTES = 6 << 20  # of all of them
ON_GPUS = ("gpufleet accept", "gpufleet monitor", "gpufleet snapshot", "pytest ")  # which this is not about
PROGRAMS = ("gpufleet", "cp", "cd", "echo", "ssh-keygen", "grep")
# A verdict may change with the limits of the day; whether a command can do what it is asked may not.
STATUSES = {"judge": (0, 1, 10), "fleet": (0, 1, 10), "compare": (0, 1)}
COMMANDS = ("verify", "sign", "report", "judge", "compare", "fleet", "calibrate", "order", "export")


def test_there_is_a_run_of_each_kind_and_they_are_small():
    assert {folder.name.rpartition("-")[2] for folder in RESULTS} == KINDS.keys()
    assert sum(path.stat().st_size for path in (DOCS / "results").rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_a_published_run_is_verified(folder, capsys):
    assert cli.main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "evidence.jsonl and summary.json and report.html" in said
    assert f": {KINDS[folder.name.rpartition('-')[2]]}\n" in said


def printed():
    """The lines of the page that are to be typed, but for what is in its first block, which says what there is."""
    page = (DOCS / "commands.md").read_text(encoding="utf-8").partition("--help` of each")[2]
    lines = re.findall(r"^ {4,7}(\S.*)$", page, re.MULTILINE)
    return [line for line in lines if line.startswith(PROGRAMS) and not line.startswith(ON_GPUS)]


def test_every_command_of_the_page_runs_on_them(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("docs").symlink_to(DOCS)
    lines, wrong = printed(), {}
    assert [name for name in COMMANDS if not any(line.startswith(f"gpufleet {name} ") for line in lines)] == []
    for line in lines:
        program, *words = shlex.split(line)
        if program == "gpufleet":
            status = cli.main([each for word in words for each in sorted(glob(word)) or [word]])
        elif program == "cd":
            status = monkeypatch.chdir(*words) or 0
        else:
            status = subprocess.run(["bash", "-c", line]).returncode
        text = "".join(capfd.readouterr())
        refused = re.search(r"^(gpufleet: |Traceback)", text, re.MULTILINE)
        if refused or status not in STATUSES.get(line.split()[1], (0,)):
            wrong[line] = text
    assert wrong == {}


MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
MADE = runpy.run_path(str(ROOT / "docs" / "make_xid_table.py"))
XIDS, RULES = (MADE["HEADS"][name] for name in ("Xids", "Xid 144-150 Decode"))
XID = {"A": "XID", "B": "31", "I": "RESTART_APP", "J": "WORKFLOW_XID_31"}
CELLS = ("145", "RLW_RXPIPE", "--01", "-010", "0x1/0x2", "IGNORE", "--11", "-110", "RESET_GPU")
RULE = dict(zip("ABCDEFGHI", CELLS, strict=True))
TEXTS = list({*XIDS.values(), *RULES.values(), *XID.values(), *CELLS})


def sheet(*rows):
    cells = ("".join(f'<c r="{at}2" t="s"><v>{TEXTS.index(text)}</v></c>' for at, text in row.items()) for row in rows)
    return f"<worksheet {MAIN}><sheetData>{''.join(f'<row>{row}</row>' for row in cells)}</sheetData></worksheet>"


def spreadsheet(path, rules):
    with zipfile.ZipFile(path, "w") as file:
        texts = "".join(f"<si><t>{text}</t></si>" for text in TEXTS)
        file.writestr("xl/sharedStrings.xml", f"<sst {MAIN}>{texts}</sst>")
        sheets = '<sheet name="Xids"/><sheet name="Xid 144-150 Decode"/>'
        file.writestr("xl/workbook.xml", f"<workbook {MAIN}>{sheets}</workbook>")
        file.writestr("xl/worksheets/sheet1.xml", sheet(XIDS, XID))
        file.writestr("xl/worksheets/sheet2.xml", rules)
        changed = "<dcterms:modified>2025-09-30T21:15:53Z</dcterms:modified>"
        file.writestr("docProps/core.xml", f'<c xmlns:dcterms="http://purl.org/dc/terms/">{changed}</c>')
    return path


def test_what_is_made_of_a_spreadsheet(tmp_path):
    table = MADE["table"](spreadsheet(tmp_path / "x.xlsx", sheet(RULES, RULE)))
    assert (table["changed"], table["actions"]) == ("2025-09-30", {"31": ["RESTART_APP", "WORKFLOW_XID_31"]})
    assert table["nvlink"] == [
        [145, "RLW_RXPIPE", first, second, status, action]
        for status in ("0x1", "0x2")
        for first, second, action in (("--01", "-010", "IGNORE"), ("--11", "-110", "RESET_GPU"))
    ]
    with pytest.raises(ValueError, match="has other columns"):
        MADE["table"](spreadsheet(tmp_path / "y.xlsx", sheet(XIDS, RULE)))
    shipped = MADE["TABLE"].read_text(encoding="utf-8")
    assert MADE["as_text"](json.loads(shipped)) == shipped
