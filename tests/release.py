"""What a release needs and no change does: translations, generated pages, packages. `make release` runs it."""

import gettext
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from html import unescape

from pytest_gpufleet import __version__
from pytest_gpufleet.model.language import in_language, say
from pytest_gpufleet.report import hosts as hosts_page, several_runs
from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.judgement import read
from tests.conftest import ROOT
from tests.report.test_languages import LATER, unlike_each_other

NAMES = ("node-", "run ", "ResNet-50")  # that stay


# ---------------------------------------------------------------- what is generated
def test_page_of_checks_is_up_to_date():
    make_checks = runpy.run_path(str(ROOT / "docs" / "make_checks.py"))
    written = make_checks["PAGE"].read_text(encoding="utf-8")
    assert written == make_checks["page"](), f"docs/checks.md is out of date: run `{make_checks['COMMAND']}`"


def test_changes_have_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(__version__)}$", text, re.MULTILINE)


def test_packages_hold_what_is_under_version_control_and_nothing_else(tmp_path):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", tmp_path], cwd=ROOT, check=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = set(listed.splitlines())
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    within = {"pytest_gpufleet/acceptance/": "acceptance/", "pytest_gpufleet/": "src/pytest_gpufleet/"}
    installed = set()
    for name in zipfile.ZipFile(wheel).namelist():
        inside = next((start for start in within if name.startswith(start)), None)
        if inside:
            installed.add(within[inside] + name.removeprefix(inside))
        else:
            assert name.startswith(f"pytest_gpufleet-{__version__}.dist-info/")
    assert installed == {name for name in tracked if name.startswith(("src/", "acceptance/"))}
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    assert packed == {name for name in tracked if not name.startswith(".ci/")}  # make test works in it


# ---------------------------------------------------------------- Chinese
MAKE_CATALOGUE = runpy.run_path(str(ROOT / "docs" / "make_catalogue.py"))
(FILE,) = MAKE_CATALOGUE["CATALOGUES"]
CHINESE = MAKE_CATALOGUE["read"](FILE)


def test_every_text_has_a_translation():
    texts = set(MAKE_CATALOGUE["texts"]())
    assert len(texts) > 400
    assert {"a rehearsal has no GPUs", "this system shows no drive of its own"} <= texts  # why a check does not apply
    assert MAKE_CATALOGUE["untranslated"](CHINESE) == [], f"translate them in {FILE}: python docs/make_catalogue.py"


def test_the_compiled_catalogue_is_that_of_the_text():
    with FILE.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for each in CHINESE:
        assert not each.id or compiled.gettext(each.id) == each.string, "python docs/make_catalogue.py"


def test_punctuation_of_chinese_is_of_full_width():
    for said in (str(each.string) for each in CHINESE if each.id):
        text = re.sub(r"`[^`]*`|\{\w+\}|(?<=\u3002)[?!] ", "x", said)  # ? and ! are marks in the legend of a map
        if re.search("[\u4e00-\u9fff]", text):
            assert not re.search(r"[\u4e00-\u9fff] ?[,;:?!()]|[,;:?!()] ?[\u4e00-\u9fff]", text), said


def test_pages_of_a_fleet_and_of_comparisons_in_chinese_have_no_english():
    """Neither in headings of tables and sections, nor in reasons."""
    fleet = judge_fleet(unlike_each_other(), (), [f"node-{number:03}" for number in range(1, 8)])
    runs = {run.host: run.record for run in unlike_each_other()}
    same = {f"run {number}": record for number, record in enumerate([read(LATER)] * 3)}
    with in_language("zh"):
        pages = [hosts_page.page(fleet, {}), *(several_runs.page(each) for each in (drift(same), compare(runs)))]
        reasons = {say(reason) for reason in fleet.reasons}
    for page in pages:
        found = re.findall(r"<(?:h\d|caption|th scope=\"col\")[^>]*>([^<]+)<", page)
        words = [text for text in found if text.isascii() and re.search("[a-z]{3}", text)]
        assert [text for text in words if not text.startswith(NAMES)] == []
    assert reasons.isdisjoint(fleet.reasons)
    assert not [reason for reason in fleet.reasons if reason in unescape(pages[0])]


def test_readme_in_chinese_has_the_same_commands_links_and_code():
    english, chinese = (_parts((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "README.zh-CN.md"))
    assert chinese == english


def _parts(text):
    """What is the same in every language: commands without their remarks, code, links, headings by their depth."""
    return {
        "commands": re.findall(
            r"^    (\w.*?)(?:\s+#.*)?$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
        ),
        "code": re.findall(r"```.*?```", text, re.DOTALL),
        "links": sorted(link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("README")),
        "headings": re.findall(r"^#+ ", text, re.MULTILINE),
        "verdicts": re.findall(r"^\| ([A-Z]+) \|", text, re.MULTILINE),
    }
