"""A page as a browser would find it, and as headless Chromium shows it."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser

import pytest


class Page(HTMLParser):
    """Tags in balance, text, headings, attributes, tables."""

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.open = []
        self.seen = []
        self.texts = []
        self.tables = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr" and self.tables:
            self.tables[-1].rows.append([])
        elif tag in ("td", "th") and self.tables:
            self.tables[-1].rows[-1].append("")
        if tag not in {"br", "img", "hr", "input", "meta", "link"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))
        if "table" in self.open and "caption" in self.open:
            self.tables[-1].caption += data
        elif {"td", "th"} & set(self.open):
            self.tables[-1].rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(text for _, text in self.texts).split())

    def headings(self):
        return [tag for tag, _ in self.seen if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}]

    def of(self, tag):
        return [text.strip() for at, text in self.texts if at == tag and text.strip()]

    def values(self, attribute):
        return [attributes[attribute] for _, attributes in self.seen if attribute in attributes]

    def table(self, caption):
        """The first one whose caption begins so."""
        return next(table for table in self.tables if table.caption.strip().startswith(caption))


class Table:
    def __init__(self):
        self.caption = ""
        self.rows = []

    def row(self, name):
        heads, *rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        cells = next(row for row in rows if row[0].startswith(name))
        return dict(zip(heads[-len(cells) :] if len(cells) < len(heads) else heads, cells, strict=True))


SECONDS = 300  # far more than it takes
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--virtual-time-budget=10000",
)  # fmt: skip
# All pages in one browser, each in a frame of its own; what each has become is written down at the end, when all that
# happens after a page is loaded has happened. The seconds are those of the virtual time, which do not pass.
LOOK = """
onload = () => setTimeout(() => document.querySelectorAll("iframe").forEach(frame => {
  const page = frame.contentDocument, verdict = page.getElementById("fleet-verdict")
  const at = verdict?.getBoundingClientRect()
  const row = page.createElement("pre")
  row.append(JSON.stringify([page.title, verdict?.textContent ?? "",
    !verdict || verdict.contains(page.elementFromPoint(at.x + 3, at.y + at.height / 2)),
    page.documentElement.scrollWidth > page.documentElement.clientWidth,
    Math.min(...[...page.querySelectorAll(".fleet-gaps td")].map(cell => cell.clientWidth), 9999),
    [...page.querySelectorAll(".fleet-map tbody tr")].filter(line => line.clientHeight).length]))
  document.body.append(row)
}), 5000)
"""


@dataclass(frozen=True)
class Seen:
    title: str
    verdict: str
    uncovered: bool  # nothing lies above the verdict
    sticks_out: bool  # something is wider than the window, and cannot be scrolled by itself
    narrowest: int  # pixels of the narrowest cell of a table of open points
    hosts: int  # of a fleet, that are in sight


def seen(pages, folder, width=1000):
    """What a reader gets to see of each page, `width` pixels wide; skips the test where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    frames = "".join(f'<iframe width="{width}" height="900" src="{escape(name)}.html"></iframe>' for name in pages)
    (folder / "frames.html").write_text(f"<!DOCTYPE html><body>{frames}<script>{LOOK}</script>")
    shown = subprocess.run(
        [CHROMIUM, *OPTIONS, "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--dump-dom",
         f"file://{folder / 'frames.html'}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=True,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    rows = Page(shown.stdout).of("pre")
    return {name: Seen(*json.loads(row)) for name, row in zip(pages, rows, strict=True)}
