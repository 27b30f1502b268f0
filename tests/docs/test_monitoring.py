"""Dashboard and alerts of docs/monitoring: they ask for what a run writes, and Prometheus and Grafana can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import prometheus

MONITORING = Path(__file__).parents[2] / "docs/monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
ALERTS = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
TEXT = {"type": "string", "minLength": 1}
DATASOURCE = {"type": "object", "required": ["type", "uid"], "properties": {"type": {"const": "prometheus"}}}
# The fields that Grafana reads of a dashboard with panels for Prometheus, after the types of @grafana/schema 13.2.3
# (dist/types/raw/dashboard): Grafana publishes no JSON Schema of them.
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "title": TEXT,
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "time": {"type": "object", "required": ["from", "to"]},
        "templating": {
            "properties": {
                "list": {
                    "items": {
                        "required": ["name", "type", "query"],
                        "properties": {"type": {"enum": ["query", "datasource"]}, "datasource": DATASOURCE},
                    }
                }
            }
        },
        "panels": {
            "minItems": 1,
            "items": {
                "required": ["id", "type", "title", "gridPos", "datasource", "fieldConfig", "targets"],
                "properties": {
                    "id": {"type": "integer"},
                    "type": {"enum": ["table", "stat", "bargauge", "timeseries"]},
                    "title": TEXT,
                    "datasource": DATASOURCE,
                    "gridPos": {
                        "required": ["h", "w", "x", "y"],
                        "properties": {"w": {"type": "integer", "maximum": 24}, "x": {"maximum": 23}},
                    },
                    "targets": {
                        "minItems": 1,
                        "items": {
                            "required": ["refId", "expr"],
                            "properties": {"expr": TEXT, "refId": TEXT, "datasource": DATASOURCE},
                        },
                    },
                    "fieldConfig": {
                        "required": ["defaults", "overrides"],
                        "properties": {
                            "defaults": {
                                "properties": {
                                    "thresholds": {
                                        "required": ["mode", "steps"],
                                        "properties": {
                                            "steps": {"minItems": 1, "items": {"required": ["color", "value"]}}
                                        },
                                    }
                                }
                            }
                        },
                    },
                },
            },
        },
    },
}


def written() -> set[str]:
    """The names of all metrics that a textfile can have."""
    record = Record()
    told = (*prometheus._of_the_run(record), *prometheus._of_nodes(record), *prometheus._of_places(record))
    return {name for name, _, _ in told}


def metrics(text: str) -> set[str]:
    return set(re.findall(r"\bgpufleet_\w+", text))


def panels() -> list[dict[str, Any]]:
    return list(DASHBOARD["panels"])


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(DASHBOARD)
    assert len({panel["id"] for panel in panels()}) == len(panels())
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels())
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)  # none covers another
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels()))) <= variables


def test_the_dashboard_asks_for_all_that_a_run_writes_and_for_nothing_else() -> None:
    asked = metrics(json.dumps([panel["targets"] for panel in panels()] + DASHBOARD["templating"]["list"]))
    assert asked == written()


def test_alerts_ask_for_what_a_run_writes() -> None:
    assert metrics(ALERTS) <= written()
    assert {"gpufleet_running", "gpufleet_run_timestamp_seconds", "gpufleet_verdict"} <= metrics(ALERTS)


def test_every_alert_is_tried() -> None:
    tried = (MONITORING / "alerts.test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"- alert: (\w+)", ALERTS)) == set(re.findall(r"- alertname: (\w+)", tried))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_when_they_have_to() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
