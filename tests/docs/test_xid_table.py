"""The table of XIDs is what docs/make_xid_table.py makes of NVIDIA's spreadsheet."""

import json
import runpy
import zipfile

import pytest

from tests.conftest import ROOT

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
