"""An order, its lines, and machines that are and are not what was ordered."""

from dataclasses import replace
from functools import partial

import pytest

from pytest_gpufleet.machine import disks, memory
from pytest_gpufleet.machine.host import read_dmi
from pytest_gpufleet.machine.network_ports import ports_of
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE
from pytest_gpufleet.verdict import orders
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.orders import ORDER_LINES, asks, held_against, order_text, ports_down
from pytest_gpufleet.verdict.toml_table import FileError
from tests.conftest import EVIDENCE, ROOT
from tests.machine.trees import laid_out
from tests.machines import recorded
from tests.verdict.test_between_nodes import DOWN, port as usual_port

NAME = 'name = "a server"\n'
# By name: the file, and what is said of it. No line: nothing stands in it.
BAD = {
    "a key that nothing reads": (NAME + '[gpus]\nmodell = "H200"\n', ':3: [gpus]: unknown key "modell"', '"model"?'),
    "a table that nothing reads": (NAME + "[gpu]\ncount = 8\n", ':2: unknown key "gpu"', 'did you mean "gpus"?'),
    "a number as a text": (NAME + '[gpus]\ncount = "8"\n', ':3: [gpus]: "count" must be a whole number', "'8'"),
    "a version as a number": (NAME + "[software]\ndriver = 580\n", ':3: [software]: "driver" must be a version', "580"),
    "a size with its unit": (NAME + '[memory]\ngibibytes = "2 TB"\n', ':3: [memory]: "gibibytes" must be', "'2 TB'"),
    "no known way to say at least": (NAME + "[gpus]\ncount = { min = 8 }\n", ':3: [gpus]: "count"', "at_least"),
    "less than nothing": (NAME + "[gpus]\ncount = -1\n", ':3: [gpus]: "count" must be a whole number', "-1"),
    "drives without a number": (NAME + "[[drives]]\ngigabytes = 3840\n", ':2: drives 1: "count" is missing', ""),
    "one kind of drives twice": (NAME + "[[drives]]\ngigabytes = 3840\ncount = 4\n" * 2, ":5: drives 2: is of one", ""),
    "one table for all kinds": (NAME + "[ports]\nadapter = 'MT4129'\n", ':2: "ports" must be a list', "[[ports]]"),
    "no name": ("[gpus]\ncount = 8\n", '"name" is missing', ""),
    "nothing": (NAME + "[gpus]\n", "orders nothing", "docs/orders.md"),
    "no TOML": ("count: 8\n", "is not valid TOML", ""),
}


def order(text):
    return Order("order.toml", "0" * 64, orders.toml_table.tomllib.loads(NAME + text))


def refused(folder, load, text, words):
    (file := folder / "mine.toml").write_text(text)
    with pytest.raises(FileError) as error:
        load(file)
    assert str(error.value).startswith(str(file))
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_order_is_told_by_file_line_and_key(tmp_path, name):
    text, *words = BAD[name]
    refused(tmp_path, orders.load, text, words)


def test_the_order_of_a_dgx_h200_is_one_and_a_written_one_reads_back_as_what_the_machine_has():
    dgx = orders.load(ROOT / "docs" / "orders" / "dgx-h200.toml")
    assert dgx.content["gpus"] == {"count": 8, "model": "NVIDIA H200", "nvlinks": 18}
    assert [kind["count"] for kind in dgx.content["drives"]] == [2, 8]
    record = read(EVIDENCE / "h200x4-c" / "evidence.jsonl")
    product = 'an "X9" \\ \x85 of \u00e9\n[gpus]\ncount = 9'
    record.machine.host["dmi"] = {"product": product, "vendor": None}
    written = orders.toml_table.tomllib.loads(order_text(record, "the run\nname = 'x'"))
    (name,) = {gpu.name for gpu in record.topology.gpus}
    assert (written["name"], written["machine"]) == (product, {"product": product})
    assert (written["gpus"]["count"], written["gpus"]["model"]) == (record.run.gpus_present or 4, name)


def test_what_a_machine_has_none_of_stands_in_its_order():
    record = read(EVIDENCE / "h100x1-h" / "evidence.jsonl")
    written = order_text(record, "h100x1-h")
    assert "# drives: none are known\n# ports: none are known\n" in written
    assert orders.toml_table.tomllib.loads(written)["gpus"]["nvlinks"] == 0


port = partial(usual_port, firmware="28.39.2048")


@pytest.fixture
def machine(tmp_path):
    """Four H200 in a host with two drives, a memory module beside an empty slot, and four ports."""
    root = laid_out("two-drives", tmp_path).root
    here = recorded().machine
    host = {
        **here.host,
        "memory_bytes": int(31.2 * 2**30),
        "dmi": codec.plain(read_dmi(root)),
        "memory_modules": codec.plain(memory.modules(root)),
        "nvme": codec.plain(disks.read_nvme(root)),
        "processor": {"model": "Intel(R) Xeon(R) Platinum 8480C", "cores": 112},
        "processor_setup": {"sockets": 2},
        "bmc_firmware": "24.9",
        "network_ports": [port(index) for index in range(4)],
        "imex": {"nodes": [f"10.0.0.{tray}" for tray in range(18)], "channels": 1, "daemon": "READY"},
    }
    return replace(here, host=host)


def said(text, machine, **topology):
    """What the lines of an order say of a machine: the codes of the faults, their places, and what is not told."""
    given, here = order(text), recorded().topology
    came = [held_against(given, key, machine, replace(here, **topology)) for key in ORDER_LINES]
    faults = [fault for each, _ in came for fault in each]
    return [(fault.name, str(fault.subjects[0])) for fault in faults], [why for _, each in came for why in each]


PORTS = "[[ports]]\nadapter = 'MT4129'\ncount = 4\n"
RIGHT = {
    "the machine": '[machine]\nvendor = "QEMU"\nproduct = "Standard PC (Q35  +  ICH9, 2009)"',
    "GPUs": '[gpus]\ncount = 4\nmodel = "NVIDIA H200"\nnvlinks = 18',
    "GPUs, at least": "[gpus]\ncount = { at_least = 3 }\nvbios = { at_least = '96.00.99' }",
    "an NVLink domain": "[domain]\nnodes = 18",
    "processors": '[processors]\nmodel = "Intel(R) Xeon(R) Platinum 8480C"\nsockets = 2\ncores = { at_least = 96 }',
    "memory, of which the kernel has not all": "[memory]\ngibibytes = 32\nmodules = 1\nmodule_gibibytes = 32",
    "drives by their labels": "[[drives]]\ngigabytes = 1920\ncount = 1\n[[drives]]\ngigabytes = 7680\ncount = 1",
    "drives of a model": "[[drives]]\ngigabytes = 7680\nmodel = 'KIOXIA KCD8XPUG7T68'\ncount = 1\nfirmware = '0105'",
    "ports": PORTS + "gigabits_per_second = 400\nfirmware = { at_least = '28.9.1' }",
    "BIOS and BMC": "[firmware]\nbios = 'rel-1.16.1-0-g3208b098f51a-prebuilt.qemu.org'\nbmc = '24.9'",
    "a newer driver": "[software]\ndriver = { at_least = '580.95.05' }\ncuda = { at_least = '12.8' }",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_machine_as_ordered(machine, name):
    assert said(RIGHT[name], machine, driver="580.159.04", cuda_driver="13.0") == ([], [])


HOST, VERSION, NODE = "host_not_as_ordered", "version_not_as_ordered", "node"
ALL = ("gpu0", "gpu1", "gpu2", "gpu3")
WRONG = {
    "another maker": ("[machine]\nvendor = 'NVIDIA'", HOST, NODE),
    "another product": ("[machine]\nproduct = 'DGXH200'", HOST, NODE),
    "a GPU less": ("[gpus]\ncount = 8", "gpus_not_as_ordered", NODE),
    "a GPU more": ("[gpus]\ncount = 2", "gpus_not_as_ordered", NODE),
    "fewer than at least": ("[gpus]\ncount = { at_least = 5 }", "gpus_not_as_ordered", NODE),
    "another model": ("[gpus]\nmodel = 'NVIDIA B200'", "gpus_not_as_ordered", *ALL),
    "fewer NVLinks": ("[gpus]\nnvlinks = 20", "gpus_not_as_ordered", *ALL),
    "an older VBIOS": ("[gpus]\nvbios = { at_least = '97.00' }", VERSION, *ALL),
    "another processor": ("[processors]\nmodel = 'Intel(R) Xeon(R) Platinum 8462Y+'", HOST, NODE),
    "one socket": ("[processors]\nsockets = 1", HOST, NODE),
    "cores": ("[processors]\ncores = 128", HOST, NODE),
    "one of 32 modules less": ("[memory]\ngibibytes = 33", HOST, NODE),
    "twice the memory": ("[memory]\ngibibytes = 16", HOST, NODE),
    "a module less": ("[memory]\nmodules = 2", HOST, NODE),
    "smaller modules": ("[memory]\nmodule_gibibytes = 64", HOST, NODE),
    "a drive less": ("[[drives]]\ngigabytes = 7680\ncount = 2", "drives_not_as_ordered", NODE),
    "drives of another size": ("[[drives]]\ngigabytes = 3840\ncount = 1", "drives_not_as_ordered", NODE),
    "drives of another model": ("[[drives]]\ngigabytes = 7680\nmodel = 'X'\ncount = 1", "drives_not_as_ordered", NODE),
    "other firmware of drives": ("[[drives]]\ngigabytes = 7680\ncount = 1\nfirmware = '0106'", VERSION, NODE),
    "ports of another adapter": ("[[ports]]\nadapter = 'MT4131'\ncount = 4", "ports_not_as_ordered", NODE),
    "ports of another link layer": (PORTS + "link_layer = 'Ethernet'", "ports_not_as_ordered", NODE),
    "other firmware of ports": (PORTS + "firmware = '28.43.2026'", VERSION, *(NODE,) * 4),
    "slower ports": (PORTS + "gigabits_per_second = 800", "ports_not_as_ordered", *(NODE,) * 4),
    "another BIOS": ("[firmware]\nbios = '1.6.7'", VERSION, NODE),
    "an older BMC": ("[firmware]\nbmc = { at_least = '24.10' }", VERSION, NODE),
    "another system": ("[software]\nsystem = 'Ubuntu 22.04.4 LTS'", VERSION, NODE),
    "another kernel": ("[software]\nkernel = '5.15.0-1063-nvidia'", VERSION, NODE),
    "a smaller NVLink domain": ("[domain]\nnodes = 36", "nvlink_domain_incomplete", NODE),
    "an older driver": ("[software]\ndriver = { at_least = '580.160' }", VERSION, NODE),
    "an older CUDA": ("[software]\ncuda = { at_least = '13.1' }", VERSION, NODE),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_machine_that_is_not_as_ordered(machine, name):
    text, code, *places = WRONG[name]
    assert said(text, machine, driver="580.159.04", cuda_driver="13.0") == ([(code, place) for place in places], [])


def test_every_line_was_seen_to_fail():
    given = [order(text) for text, *_ in WRONG.values()]
    assert {key for key in ORDER_LINES if any(asks(each, key) for each in given)} == ORDER_LINES.keys()


@pytest.mark.parametrize("text", [
    "[machine]\nproduct = 'DGXH200'", "[processors]\nsockets = 2", "[memory]\nmodules = 32",
    "[memory]\nmodule_gibibytes = 64", "[[drives]]\ngigabytes = 3840\ncount = 8", "[firmware]\nbios = '1.6.7'",
    "[firmware]\nbmc = '24.9'", "[software]\ndriver = '580'",
])  # fmt: skip
def test_what_a_machine_does_not_tell_is_no_fault_and_not_met(text):
    faults, untold = said(text, recorded().machine, driver=None)
    assert faults == []
    assert len(untold) == 1


def test_of_modules_that_are_all_missing_nothing_is_known(machine):
    empty = replace(machine, host={**machine.host, "memory_modules": [{"locator": "A1", "bytes": 0}]})
    assert said("[memory]\nmodule_gibibytes = 64", empty) == ([], ["the size in GiB is not known: there is none"])


@pytest.mark.parametrize(("text", "states", "named"), [
    (PORTS, (0, 0, 0, 0), {"mlx5_0/1", "mlx5_1/1", "mlx5_2/1", "mlx5_3/1"}),
    (PORTS, (1, 0, 1, 1), {"mlx5_1/1"}),
    (PORTS + "in_use = 2\n", (1, 0, 1, 0), set()),
    (PORTS + "in_use = 3\n", (1, 0, 1, 0), {"mlx5_1/1", "mlx5_3/1"}),
    (PORTS + "in_use = 0\n", (0, 0, 0, 0), set()),
    (PORTS.replace("MT4129", "MT4131"), (0, 0, 0, 0), set()),
    ("[gpus]\ncount = 4", (0, 0, 0, 0), set()),
    (None, (0,), set()),
])  # fmt: skip
def test_ports_that_are_down_although_they_were_ordered(text, states, named):
    ports = ports_of({"network_ports": [port(index, **({} if up else DOWN)) for index, up in enumerate(states)]})
    found = ports_down(order(text) if text else None, ports)
    assert {fault.what.partition(" ")[0] for fault in found} == named


def test_a_fault_says_what_is_and_what_was_ordered_also_of_ports_of_which_none_is_up(machine):
    here = replace(machine, host={**machine.host, "network_ports": [port(0, **DOWN)]})
    text = "[[ports]]\nadapter = 'MT4129'\ncount = 1\ngigabits_per_second = 400"
    assert said(text, here) == ([("ports_not_as_ordered", "node")], [])
    given = order("[gpus]\ncount = { at_least = 8 }\nmodel = 'NVIDIA B200'\n[[drives]]\ngigabytes = 7680\ncount = 2")
    keys = ("gpus.count", "gpus.model", "drives.count")
    count, model, drives = (held_against(given, key, machine, recorded().topology)[0][0] for key in keys)
    assert count == Fault("gpus_not_as_ordered", (THIS_NODE,), "the number of GPUs is 4, ordered: at least 8")
    assert model.what == "name is NVIDIA H200, ordered: NVIDIA B200"
    assert drives.what == "the number of NVMe drives of 7680 GB is 1, ordered: 2"
