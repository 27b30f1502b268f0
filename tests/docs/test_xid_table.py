"""The table of XIDs is what docs/make_xid_table.py makes of NVIDIA's spreadsheet."""

import json
import runpy
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
TEXTS = ("XID", "31", "RESTART_APP", "WORKFLOW_XID_31", "145", "RLW_RXPIPE", "--01", "-010", "0x1/0x2", "IGNORE")
MORE = ("--11", "-110", "RESET_GPU")
HEADS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_xid_table.py"))["HEADS"]
ALL = (*TEXTS, *MORE, *{head for heads in HEADS.values() for head in heads.values()})


def sheet(*rows):
    strings = ALL
    cells = [
        "".join(f'<c r="{column}2" t="s"><v>{strings.index(text)}</v></c>' for column, text in row.items())
        for row in rows
    ]
    return f"<worksheet {MAIN}><sheetData>{''.join(f'<row>{row}</row>' for row in cells)}</sheetData></worksheet>"


def write(path, contents):
    with zipfile.ZipFile(path, "w") as file:
        for name, text in contents.items():
            file.writestr(name, text)


def test_what_is_made_of_a_spreadsheet(tmp_path):
    rule = dict(zip("ABCDEFGHI", (*TEXTS[4:], *MORE), strict=True))
    contents = {
        "xl/sharedStrings.xml": f"<sst {MAIN}>{''.join(f'<si><t>{text}</t></si>' for text in ALL)}</sst>",
        "xl/workbook.xml": f'<workbook {MAIN}><sheet name="Xids"/><sheet name="Xid 144-150 Decode"/></workbook>',
        "xl/worksheets/sheet1.xml": sheet(
            HEADS["Xids"], {"A": "XID", "B": "31", "I": "RESTART_APP", "J": "WORKFLOW_XID_31"}
        ),
        "xl/worksheets/sheet2.xml": sheet(HEADS["Xid 144-150 Decode"], rule),
        "docProps/core.xml": '<c xmlns:dcterms="http://purl.org/dc/terms/">'
        "<dcterms:modified>2025-09-30T21:15:53Z</dcterms:modified></c>",
    }
    write(tmp_path / "x.xlsx", contents)
    made = runpy.run_path(str(ROOT / "docs" / "make_xid_table.py"))
    told = made["table"](tmp_path / "x.xlsx")
    assert told["changed"] == "2025-09-30"
    assert told["actions"] == {"31": ["RESTART_APP", "WORKFLOW_XID_31"]}
    assert told["nvlink"] == [
        [145, "RLW_RXPIPE", first, second, status, action]
        for status in ("0x1", "0x2")
        for first, second, action in (("--01", "-010", "IGNORE"), ("--11", "-110", "RESET_GPU"))
    ]
    assert json.loads(made["as_text"](told)) == told
    shipped = made["TABLE"].read_text(encoding="utf-8")
    assert made["as_text"](json.loads(shipped)) == shipped
    write(tmp_path / "y.xlsx", {**contents, "xl/worksheets/sheet2.xml": sheet(HEADS["Xids"], rule)})
    with pytest.raises(ValueError, match="has other columns"):
        made["table"](tmp_path / "y.xlsx")
