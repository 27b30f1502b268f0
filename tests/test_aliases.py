"""Aliases hide what tells one machine from others, are the same for the same thing, and leave all else as it is."""

import json
import re
import socket

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.redaction import ALIAS_KEY, aliased, use_aliases
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.reading import read
from tests.conftest import RECORDED, REPORTS
from tests.run.test_resume import interrupted

UUID = "9f0e8a1c-1111-4222-8333-444455556666"
MACHINE = {
    "host": "dgx-a017.site.example", "serial": "1653220812345", "uuid": f"GPU-{UUID}",
    "memory_modules": [{"serial": "1F3A9C1D"}, {"serial": "7"}, {"serial": None}],
    "dmi": {"chassis_serial": "CZJ1", "product": "DGX H200"}, "network_ports": [{"guid": "0c42:a103:0065:a1b2"}],
}  # fmt: skip
SECRET = (
    "dgx-a017.site.example says", "on dgx-a017: it hung", "tcp://dgx-a017.site.example:29500", "serial 1653220812345",
    f"GPU-{UUID}", f"CUDA_VISIBLE_DEVICES=MIG-{UUID},1", f"'GPU-{UUID[:8]}...-{UUID[-12:]}'", f"boot {UUID}",
    "node7:1:2 [0] NCCL WARN", "connect to 52.1.2.3<45678>", "10.1.2.3", "http://52.1.2.3/x", "2001:db8::17",
    "fe80::1:2", "[fd42::9]", "enx0c42a165a1b2", "/nfs/bob/x.py", "eth0 0c:42:a1:65:a1:b2",
    "port 0c42:a103:0065:a1b2", "/home/ann/x.py", '<x hostname="vm"',
)  # fmt: skip
HARMLESS = (
    "GPU 0 NVIDIA H200, 0000:18:00.0", "vbios 96.00.74.00.1A", "driver 580.159.04, cuBLAS 12.4.5.8", "127.0.0.1:29500",
    "at 12:34:56.789", "node1/gpu3 and gpu12", "std::add", "test_a.py::test_dead::x", "f00d::", "31.4159 GB/s",
    "/root/x.py", "mlx5_0/1", "localhost", "a" * 64,
)  # fmt: skip


@pytest.fixture
def active(monkeypatch):
    monkeypatch.delenv(ALIAS_KEY, raising=False)
    monkeypatch.setenv("HOME", "/nfs/bob")
    use_aliases(True)
    aliased(MACHINE)
    yield
    use_aliases(False)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("text", SECRET)
def test_what_tells_a_machine_from_others_is_replaced_once(text):
    hidden = aliased(text)
    known = re.compile(
        r"dgx|a017|example|1653220812345|9f0e8a1c|444455556666|node7|52\.1|10\.1\.2|db8|fe80|fd42|0c.?42|bob|ann|vm\b"
    )
    assert not known.search(hidden)
    assert aliased(hidden) == hidden


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_stays(text):
    assert aliased(text) == text


@pytest.mark.usefixtures("active")
def test_a_thing_has_one_alias_everywhere_by_one_key(monkeypatch):
    hidden = aliased(MACHINE)
    modules = [each["serial"] for each in hidden["memory_modules"]]
    assert (modules[2], hidden["dmi"]["product"]) == (None, "DGX H200")
    assert not {*modules, hidden["dmi"]["chassis_serial"]} & {"1F3A9C1D", "7", "CZJ1"}
    assert aliased("serial 1653220812345") == f"serial {hidden['serial']}"
    assert aliased({"gpus": [f"GPU-{UUID}"]}) == {"gpus": [hidden["uuid"]]}
    monkeypatch.setenv(ALIAS_KEY, "a word of ours")
    use_aliases(True)
    assert aliased(MACHINE)["serial"] not in (hidden["serial"], MACHINE["serial"])


CHECK = """
import socket

def test_passes():
    pass

def test_fails():
    print(socket.gethostname(), "GPU-00000000-0000-0000-0000-000000000002")
    assert "0000000000002" == socket.gethostname()
"""


def test_a_run_with_aliases_can_be_published_verified_and_resumed(run_pytest):
    options, files = ("--gpus=4", f"--fleet-dir={REPORTS}", "--fleet-alias", *RECORDED), {"test_inner.py": CHECK}
    (folder,) = run_pytest(*options, files=files).folders
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert len(texts) == 5
    secrets = {"(?<!0)0{12}[0-9]\\b", "GPU-0000", f'(host|hostname|name)": ?"{socket.gethostname()}"'}
    for name, text in texts.items():
        found = [text[max(0, at.start() - 40) : at.end()] for each in secrets for at in re.finditer(each, text)]
        assert not found, name
        assert "alias-" in text
    assert cli.main(["verify", str(folder)]) == 0
    gpus = read(folder / "evidence.jsonl").topology.gpus
    assert len({gpu.serial for gpu in gpus} | {gpu.uuid for gpu in gpus}) == 8
    again = run_pytest(*options, f"--fleet-resume={interrupted(folder)}", files=files)
    assert again.check("test_passes").run == RunFolder(folder).name
    assert json.loads((again.folders[0] / "summary.json").read_text())["gpus"][2]["serial"] == gpus[2].serial
