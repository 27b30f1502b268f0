"""Writes the table of XIDs from NVIDIA's catalogue: `python docs/make_xid_table.py Xid-Catalog.xlsx`.

The spreadsheet is linked on the page that ORIGIN names. Only numbers, sub-codes and actions are taken over: what an XID
means is said in machine/xid_meanings.json in our own words.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ORIGIN = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
TABLE = Path(__file__).parents[1] / "src" / "pytest_gpufleet" / "machine" / "xid_table.json"
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
MODIFIED = "{http://purl.org/dc/terms/}modified"
XIDS, NVLINK = "Xids", "Xid 144-150 Decode"
# How the heads of the columns that are used begin, by sheet: another edition may have others.
HEADS = {
    XIDS: {"A": "Type", "B": "Code", "I": "Resolution Bucket", "J": "Resolution Bucket"},
    NVLINK: {
        "A": "Xid", "B": "Subcode", "C": "(V1", "D": "(V2", "E": "Error Status", "F": "Resolution Bucket",
        "G": "(V1", "H": "(V2", "I": "Action 2",
    },
}  # fmt: skip
ANY_STATUS = ""  # the cell is empty


def table(spreadsheet: Path) -> dict[str, Any]:
    """`actions`: of each XID what has to be done at once, and what to find out why. `nvlink`: of XIDs 144 to 150 the
    sub-code; the bits of the message's first number before and from driver 575 on, "-" for any; the second number,
    empty for any; and what has to be done. ValueError for a spreadsheet with other columns."""
    with zipfile.ZipFile(spreadsheet) as file:
        strings = ["".join(text.text or "" for text in each.iter(f"{MAIN}t")) for each in _xml(file, "sharedStrings")]
        names = [sheet.get("name") for sheet in _xml(file, "workbook").iter(f"{MAIN}sheet")]
        sheets = {name: list(_rows(file, number, strings)) for number, name in enumerate(names, 1)}
        for name, heads in HEADS.items():
            if not all(sheets[name][0].get(column, "").startswith(head) for column, head in heads.items()):
                raise ValueError(f"sheet {name!r} has other columns than {heads}: {sheets[name][0]}")
        modified = ElementTree.fromstring(file.read("docProps/core.xml")).findtext(MODIFIED) or ""
    return {
        "origin": ORIGIN,
        "changed": modified[:10],
        "sha256": hashlib.sha256(spreadsheet.read_bytes()).hexdigest(),
        "actions": {row["B"]: [row.get("I", ""), row.get("J", "")] for row in sheets[XIDS] if row.get("A") == "XID"},
        "nvlink": [rule for row in sheets[NVLINK] if row.get("A", "").isdigit() for rule in _rules(row)],
    }


def _rules(row: dict[str, str]) -> Iterator[list[Any]]:
    """What a row of the decoding says; one that is promoted to another action is a second rule."""
    for status in row.get("E", ANY_STATUS).split("/"):
        yield [int(row["A"]), row["B"], row["C"], row["D"], status, row["F"]]
        if "I" in row:
            yield [int(row["A"]), row["B"], row["G"], row["H"], status, row["I"]]


def _xml(file: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(file.read(f"xl/{name}.xml"))


def _rows(file: zipfile.ZipFile, number: int, strings: list[str]) -> Iterator[dict[str, str]]:
    """The rows of a sheet, each by the letters of its columns. Empty cells are left out."""
    for row in _xml(file, f"worksheets/sheet{number}").iter(f"{MAIN}row"):
        cells = {}
        for cell in row:
            column = re.match("[A-Z]+", cell.get("r", ""))
            value = cell.findtext(f"{MAIN}v")
            if column and value is not None:
                cells[column[0]] = (strings[int(value)] if cell.get("t") == "s" else value).strip()
        yield cells


def as_text(told: dict[str, Any]) -> str:
    """JSON with one XID and one rule a line, so that a change of the catalogue can be read."""

    def lines(items: list[str]) -> str:
        return ",\n".join(f"    {item}" for item in items)

    head = "".join(f"  {json.dumps(key)}: {json.dumps(told[key])},\n" for key in ("origin", "changed", "sha256"))
    actions = lines([f"{json.dumps(number)}: {json.dumps(action)}" for number, action in told["actions"].items()])
    rules = lines([json.dumps(rule) for rule in told["nvlink"]])
    return f'{{\n{head}  "actions": {{\n{actions}\n  }},\n  "nvlink": [\n{rules}\n  ]\n}}\n'


if __name__ == "__main__":
    TABLE.write_text(as_text(table(Path(sys.argv[1]))), encoding="utf-8")
