"""Figures and sentences in words, and in other languages, where nothing but the words changes. That each text has a
translation: tests/release.py."""

import copy
import re
from dataclasses import replace
from html import unescape
from string import Formatter

import pytest
from babel.messages.pofile import read_po

from pytest_gpufleet import cli
from pytest_gpufleet.model.language import LANGUAGES, LOCALE, Listed, Said, in_language, say
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.place import read as place_of
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import hosts as hosts_page, page as report_page, several_runs, wording
from pytest_gpufleet.report.banner import reasons, why
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import settled
from tests.conftest import EVIDENCE, REPORTS
from tests.fleets import fleet_of, host_run, rejected, slower
from tests.runs import topology

NUMBERS = {
    0: "0", 366.94: "366.9", 9999.9: "10,000", 1234567.0: "1,235,000", 0.01234567: "0.01235", 1e308: "1e+308",
    5e-324: "4.941e-324", float("nan"): "not a number", float("inf"): "inf",
}  # fmt: skip
SIZES = {0: "0 B", 8: "8 B", 64 * MiB: "64 MiB", 8 * GiB: "8 GiB", 1536: "1.5 KiB"}


def test_numbers_and_sizes_are_short_and_conditions_come_in_the_order_of_speech():
    assert {value: wording.number(value) for value in NUMBERS} == NUMBERS
    assert {nbytes: wording.size(nbytes) for nbytes in SIZES} == SIZES
    conditions = {"fan_speed": 3, "nvls": True, "nccl": 22_809, "in_place": True, "ranks": 1, "bytes": 64 * MiB}
    shown = ["broadcast", "64 MiB", "1 rank", "in place", "NVLS on", "NCCL 2.28.9", "fan speed 3"]
    assert wording.words({**conditions, "collective": "broadcast"}) == shown


SEVERAL, ONE = {0: "gf1", 1: "gf2", 2: "gf10"}, {0: "gf1"}


@pytest.mark.parametrize(("where", "hosts", "text"), [
    ("gpu3", SEVERAL, "gf1 GPU 3"),
    ("node2/gpu3", SEVERAL, "gf10 GPU 3"),
    ("node1/gpu0-node1/gpu5", SEVERAL, "gf2 GPU 0 to GPU 5"),
    ("gpu0-node2/gpu0", SEVERAL, "gf1 GPU 0 to gf10 GPU 0"),
    ("node", SEVERAL, "gf1"),
    ("node1-node2", SEVERAL, "gf2 to gf10"),
    ("group3", SEVERAL, "group 3"),
    ("world", SEVERAL, "all ranks together"),
    ("node7/cpu1", SEVERAL, "node 7 CPU rank 1"),
    ("gpu0-gpu5", ONE, "GPU 0 to GPU 5"),
    ("gpu0-gpu5", {}, "GPU 0 to GPU 5"),
    ("cpu3", ONE, "CPU rank 3"),
    ("node", ONE, "node"),
])  # fmt: skip
def test_places_are_told_with_their_hosts_where_there_are_several(where, hosts, text):
    assert wording.place(place_of(where), hosts) == text


LATER = EVIDENCE / "h200x4-a" / "evidence.jsonl"
TEXT, SAID = re.compile(r"<text[^>]*>([^<]*)</text>"), re.compile(r' aria-label="[^"]*"|(?<=>)[^<]*(?=</text>)')


def within(language, made, *arguments, **values):
    with in_language(language):
        return made(*arguments, **values)


def test_names_of_values_and_commands_are_not_translated():
    with next(LOCALE.glob("zh/*/*.po")).open("rb") as file:
        for each in (each for each in read_po(file) if each.id):
            named = [{name for _, name, _, _ in Formatter().parse(text) if name} for text in (each.string, each.id)]
            assert named[0] == named[1]
            assert set(re.findall(r"`[^`]+`", each.string)) == set(re.findall(r"`[^`]+`", each.id)), each.id


def test_what_has_no_translation_is_english_and_sentences_are_joined_as_their_language_does():
    assert within("zh", say, "no such text {count}", count=3) == "no such text 3"
    assert within("zh", say, "") == ""
    assert within("zh", say, "REJECTED").endswith("REJECTED")
    assert "<b>{host}</b>" in within("zh", say, "Verdict of this run on {host}:", host="<b>{host}</b>")  # as it is
    assert wording.sentences("No GPU is here.", "", "Look.") == "No GPU is here. Look."
    assert wording.sentences("没有 GPU。", "Look.", "请检查。") == "没有 GPU。Look. 请检查。"
    assert wording.sentences() == ""


@pytest.mark.parametrize("run", ["h200x1-e", "h200x2-f", "h200x4-a", "h200x4-neighbour"])
def test_recorded_run_in_both_languages_has_the_same_figures_and_names(run):
    folder = RunFolder(EVIDENCE / run)
    record, digest = folder.record(), folder.digest()
    english, chinese = (report_page.page(record, digest, language=language) for language in ("en", "zh"))
    assert english == report_page.page(record, digest)
    assert '<html lang="en">' in english
    assert '<html lang="zh-CN">' in chinese
    assert "签字验收" in chinese
    assert within("zh", say, record.verdict or "") in chinese
    assert _figures(chinese) == _figures(english)
    assert re.findall(r'(?:id|href|class)="[^"]*"', chinese) == re.findall(r'(?:id|href|class)="[^"]*"', english)
    assert within("zh", why, record) != why(record) == within("en", why, record)
    for block in re.split(r"</?(?:p|td|th|li|div|h\d|tr|summary|section|dt|dd|title)\b[^>]*>|<br>", chinese):
        text = re.sub(r"<[^>]+>", "", block)
        assert not re.search(r"[。！？：；，、] +\S", text), text  # noqa: RUF001
    drawn, other = (re.findall(r"<svg .*?</svg>", page, re.DOTALL) for page in (english, chinese))
    assert [SAID.sub("", each) for each in drawn] == [SAID.sub("", each) for each in other] != []
    words = [(TEXT.findall(one), TEXT.findall(two)) for one, two in zip(drawn, other, strict=True)]
    pairs = {pair for one, two in words for pair in zip(one, two, strict=True) if pair[0] != pair[1]}
    assert not [text for _, text in pairs if not re.search("[\uff0c\u4e00-\u9fff]", text)]
    shown = {text for _, two in words for text in two}
    assert shown & {"限值", "数据量", "rank 数"} or any("UTC 起的" in each for each in shown)
    assert not {"measured", "median", "limit", "message size", "ranks", ""} & shown


@pytest.mark.parametrize("run", ["h200x2-f", "h200x4-a", "h200x4-neighbour"])
def test_the_end_of_the_terminal_in_chinese_is_80_columns_wide_and_breaks_before_no_punctuation(run):
    lines = [text for text, _ in within("zh", summary_lines, RunFolder(EVIDENCE / run).record())]
    chinese = [line for line in lines if re.search("[\u4e00-\u9fff]", line)]
    assert len(chinese) > 5
    assert not [line for line in chinese if len(line) + len(re.findall("[\u2e80-\u9fff\uff00-\uffef]", line)) > 80]
    assert not [line for line in chinese if line.lstrip()[0] in "\u3001\u3002\uff0c\uff1a\uff1b"]


def test_language_of_a_run_is_on_record_and_report_writes_it_again_in_the_other(run_pytest, capsys):
    files = {"test_one.py": "def test_one(): pass"}
    run = run_pytest("--rehearse=1", "--fleet-language=zh", f"--fleet-dir={REPORTS}", files=files)
    (folder,) = run.folders
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert run.record.run.language == "zh"
    assert '<html lang="zh-CN">' in page
    assert "签字验收" in page
    assert "CPU ranks stood in" not in page
    assert "REHEARSAL" in run.text
    assert "演练 REHEARSAL" in run.text
    again = folder.parent / "again.html"
    assert cli.main(["report", str(folder), "--language", "en", "-o", str(again)]) == 0
    assert "Sign-off" in again.read_text(encoding="utf-8")
    assert "签字验收" not in again.read_text(encoding="utf-8")


def unlike_each_other():
    """Hosts of which one is rejected, one slower, one of another kernel, and one not there."""
    slow, other = host_run("node-003", change=slower(0.1)), host_run("node-004", facts={"kernel": "6.9.9"})
    return fleet_of(5, node_002=rejected("node-002"), node_003=slow, node_004=other)


def test_fleet_and_comparisons_in_both_languages_have_the_same_figures_and_names():
    fleet = judge_fleet(unlike_each_other(), (), [f"node-{number:03}" for number in range(1, 8)])
    english, chinese = (within(language, hosts_page.page, fleet, {}) for language in ("en", "zh"))
    assert english == hosts_page.page(fleet, {})
    assert all(reason in unescape(english) for reason in fleet.reasons)
    assert all(within("zh", say, reason) in unescape(chinese) for reason in fleet.reasons)
    assert _structure(chinese) == _structure(english)
    differing = {run.host: run.record for run in unlike_each_other()}
    same = {f"run {number}": record for number, record in enumerate([read(LATER)] * 3)}
    for found in (compare(differing), drift(same)):
        english, chinese = (within(language, several_runs.page, found) for language in ("en", "zh"))
        assert _structure(chinese) == _structure(english)


def test_what_was_said_in_english_can_be_said_again():
    told = Said("{hosts} REJECTED", hosts=Said("1 host ({hosts})", hosts="{odd} ACCEPTED"))
    assert told == "1 host ({odd} ACCEPTED) REJECTED"
    assert within("zh", say, told) == "1 台主机（{odd} ACCEPTED）为 REJECTED"  # noqa: RUF001
    assert within("en", say, told) == copy.deepcopy(told) == told
    listed = Said("{host}: {others}", host="node7", others=Listed([Said("unknown"), "575.57"]))
    assert listed == "node7: unknown, 575.57"
    assert within("zh", say, copy.deepcopy(listed)) == "node7: 未知，575.57"  # noqa: RUF001


def test_reasons_follow_in_the_language_of_the_page_and_those_of_another_verdict_stay_as_they_are():
    record = settled(Record(topology=topology(), deselected=["test_1_inventory.py::test_gpu_count"]), "")
    english, chinese = (within(language, reasons, record) for language in LANGUAGES)
    (position,) = (number for number, text in enumerate(english) if text.endswith(": deselected"))
    assert chinese[position].endswith("：未选中")  # noqa: RUF001
    record = replace(record, verdict="REJECTED", reasons=["as an earlier version said it"])
    assert within("zh", reasons, record) == record.reasons


def _structure(page):
    """What refers to what, and the cells that no language changes: figures with their units."""
    return re.findall(r'(?:id|href|class|colspan)="[^"]*"|>-?[\d.,]+ ?[%A-Za-z/]*</td>', page)


def _figures(page):
    page = page.replace(" 分 ", " min ").replace(" 秒", " s")
    return re.findall(r'<td class="fleet-[^"]*fleet-right[^"]*">([-\d][^<]*)', page)
