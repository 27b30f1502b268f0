"""Who hears of figures, faults and the verdict by the hooks of the plugin. The example is that of docs/trackers.md."""

import json
import re
from xml.etree import ElementTree

import pytest

from pytest_gpufleet.model.fault import CODES
from tests.conftest import RECORDED, REPORTS, ROOT

EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs/trackers.md").read_text(encoding="utf-8"), re.DOTALL)[1]
CHECKS = """
    from pytest_gpufleet import Fault, Faults, Measurement
    from pytest_gpufleet.model.place import gpu

    def test_figure(judge):
        judge(Measurement("busbw", {"world": 360.0}, {"collective": "all_reduce", "ranks": 4, "bytes": 8 << 30}))

    def test_faulty():
        raise Faults([Fault("ecc_off", (gpu(0),), "ECC is off")])
"""
# Called before the example, which must hear all the same.
HOARSE = """
    import pytest

    def pytest_gpufleet_finding(finding):
        pytest.skip("no figures today")

    def pytest_gpufleet_fault(fault):
        assert fault is None

    def pytest_gpufleet_verdict(record):
        pytest.fail("speechless")
"""
# Called after it.
LEAVING = """
    import pytest

    def pytest_gpufleet_verdict():
        pytest.exit("all is well", returncode=0)
"""


def heard(run):
    return [json.loads(line) for line in (run.root / "heard.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(run_pytest):
    files = {"conftest.py": EXAMPLE, "hoarse.py": HOARSE, "checks/conftest.py": LEAVING, "checks/test_it.py": CHECKS}
    options = ("-p", "hoarse", "--fleet-prometheus=gpus.prom", *RECORDED, "-W", "error")
    return run_pytest("--gpus=4", f"--fleet-dir={REPORTS}", *options, files=files, PYTHONPATH=f".:{ROOT}")


def test_the_example_hears_of_all_and_the_plugin_before_all_others(run):
    (folder,) = run.folders
    figure, fault, *verdict = heard(run)
    assert figure == {"metric": "busbw", "place": "world", "value": 360.0, "state": "met"}
    assert fault == {"code": CODES["ecc_off"].number, "name": "ecc_off", "action": "CONFIG", "what": "gpu0: ECC is off"}
    assert verdict == [{"verdict": "REJECTED", "reasons": run.record.reasons, "run": folder.name}]
    values = {
        each.get("name").partition(" ")[2]: each.get("value")
        for each in ElementTree.parse(folder / "junit.xml").iterfind("testsuite/properties/property")
    }
    assert values["busbw world"] == "360 GB/s"
    assert values["fault"].endswith("ecc_off gpu0: ECC is off")
    text = (run.root / "gpus.prom").read_text()
    assert re.findall(r'^gpufleet_verdict{.*verdict="(\w+)"} 1.0', text, re.MULTILINE) == ["REJECTED"]


def test_what_a_listener_raises_is_reported_and_changes_nothing(run):
    assert run.outcomes == {"test_figure": "passed", "test_faulty": "failed"}
    assert "pytest_gpufleet_finding of hoarse raised Skipped: no figures today" in run.text
    assert "pytest_gpufleet_fault of hoarse raised AssertionError" in run.text
    assert "pytest_gpufleet_verdict of hoarse raised Failed: speechless" in run.text
    assert "conftest.py raised Exit: all is well" in run.text
    assert (run.record.verdict, run.status) == ("REJECTED", 1)


def test_of_many_nodes_each_run_of_its_own_hears_and_the_run_over_all(run_pytest):
    module = """
        from pytest_gpufleet import Measurement

        def test_figure(judge):
            judge(Measurement("busbw", {"cpu0": 36.0}, {"collective": "all_reduce", "bytes": 8}))

        def test_fails():
            raise OSError("out of order")
    """
    files = {"test_inner.py": module, "conftest.py": EXAMPLE}
    run = run_pytest("--rehearse=1", "--nodes=2", f"--fleet-dir={REPORTS}", files=files)
    events = heard(run)
    figures = [(each["metric"], each["place"]) for each in events if "metric" in each]
    assert figures == [("busbw", "cpu0")] * 2, run.text
    assert [each["what"] for each in events if "what" in each] == ["OSError: out of order"] * 2
    assert [each["verdict"] for each in events if "verdict" in each] == ["REHEARSAL"] * 3
