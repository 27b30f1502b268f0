"""What a host tells of itself, where it is more than one call."""

import pytest

from pytest_gpufleet.hardware import host


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A folder for libraries that the loader looks into, and nothing else that it could find."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setattr(host, "_by_the_loader", lambda name: None)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "file", "found"),
    [
        (None, "libnccl-net.so", True),
        (None, "libnccl-net-ofi.so", False),
        ("ofi", "libnccl-net-ofi.so", True),
        ("ofi", "libnccl-net.so", False),
        ("libmine.so", "libmine.so", True),
        ("none", "libnccl-net.so", False),
    ],
)
def test_the_plugin_of_nccl_is_the_file_that_it_would_load(libraries, monkeypatch, asked, file, found):
    (libraries / file).touch()
    if asked is not None:
        monkeypatch.setenv("NCCL_NET_PLUGIN", asked)
    assert host.read()["nccl_net_plugin"] == (str(libraries / file) if found else "none")


def test_a_library_in_the_loaders_cache_is_found():
    assert host._by_the_loader("libc.so.6").endswith("libc.so.6")
    assert host._by_the_loader("libc.so") is None
