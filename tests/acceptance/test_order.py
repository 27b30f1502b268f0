"""Whole checks of an order on a recorded machine: what each of them says, and what its verdict is."""

from pytest_gpufleet import cli
from pytest_gpufleet.verdict.orders import load
from tests.acceptance.checks import outcomes
from tests.acceptance.test_faulty_machines import ONE_DOWN, port
from tests.conftest import ACCEPTANCE, RECORDED
from tests.machines import recorded, set_gpu, set_host

RIGHT = """
name = "four H200"
[gpus]
count = 4
model = "NVIDIA H200"
nvlinks = 18
[software]
driver = { at_least = "580.95.05" }
"""


def given(text, folder):
    file = folder / "order.toml"
    file.write_text(text)
    return load(file)


def as_ordered(text, folder, *changes):
    came = outcomes(recorded(*changes), fleet_order=given(text, folder))
    return {name: outcome for name, outcome in came.items() if name.startswith("test_as_ordered")}


def test_a_right_machine_meets_each_line_and_the_others_do_not_apply(tmp_path):
    came = as_ordered(RIGHT, tmp_path)
    asked = {f"test_as_ordered[{line}]" for line in ("gpus.count", "gpus.model", "gpus.nvlinks", "software.driver")}
    assert {name for name, outcome in came.items() if outcome.what == "passed"} == asked
    assert {outcome.what for name, outcome in came.items() if name not in asked} == {"not applicable"}
    without = outcomes(recorded())
    assert {outcome.what for name, outcome in without.items() if "as_ordered" in name} == {"not applicable"}


def test_the_line_that_is_not_met_fails_and_no_other_and_one_that_cannot_be_read_is_not_judged(tmp_path):
    came = as_ordered(RIGHT, tmp_path, set_gpu(2, nvlink_states=ONE_DOWN))
    failed = {name: outcome.gpus for name, outcome in came.items() if outcome.what == "failed"}
    assert failed == {"test_as_ordered[gpus.nvlinks]": {2}}
    came = as_ordered(f"{RIGHT}[memory]\nmodules = 32\n", tmp_path)["test_as_ordered[memory.modules]"]
    assert (came.what, "not judged" in came.message) == ("skipped", True)


def test_ports_that_are_down_everywhere_are_named_unless_nothing_is_asked_of_the_network(tmp_path):
    down = [port(number, state="1: DOWN", rate="10 Gb/sec") for number in range(4)]
    here, check = recorded(set_host(network_ports=down)), "test_network_ports_are_active"
    order = given(RIGHT + "[[ports]]\nadapter = 'MT4129'\ncount = 4\n", tmp_path)
    assert outcomes(here, fleet_network="none")[check].what == "not applicable"
    for found in (outcomes(here), outcomes(here, fleet_order=order, fleet_network="none")):
        named = {fault.what.partition(" ")[0] for fault in found[check].faults}
        assert named == {f"mlx5_{index}/1" for index in range(4)}


def test_a_run_keeps_the_order_and_others_can_be_written_from_it(run_pytest, tmp_path, capsys):
    options = ("--gpus=4", "--fleet-level=quick", "--fleet-order=order.toml", *RECORDED, "--fleet-dir=runs")
    run = run_pytest(*options, str(ACCEPTANCE / "test_1_order.py"), files={"order.toml": RIGHT})
    record, (folder,) = run.record, run.folders
    assert {check.outcome for check in record.checks.values()} == {"passed", "not applicable"}, run.text
    assert record.order == given(RIGHT, tmp_path)
    assert (record.run.order, record.run.order_sha256) == (record.order.file, record.order.sha256)
    assert record.order.sha256 in (folder / "report.html").read_text()
    written = tmp_path / "written.toml"
    assert cli.main(["order", str(folder), "-o", str(written)]) == 0
    assert f"that run: {record.verdict};" in capsys.readouterr().out  # it was of some checks alone
    assert cli.main(["order", str(folder), "-o", str(written)]) == 1  # it is left as it is
    assert outcomes(recorded(), fleet_order=load(written))["test_as_ordered[gpus.vbios]"].what == "passed"
