"""Where compiled code is kept: in a folder that nobody else can have put anything into, or nowhere."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.probes.training import compile_cache

GPU = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Makes the GPU that the compiler compiles for another one, by name."""

    def is_called(name):
        compile_cache.folder_of.cache_clear()
        about = SimpleNamespace(**{**vars(GPU), "name": name})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)

    is_called(GPU.name)
    yield is_called
    compile_cache.folder_of.cache_clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.py"
    path.write_text("pass")
    return path


@pytest.fixture
def base(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


def below(base: Path, folder: Path) -> bool:
    return base.resolve() in folder.parents


def test_the_same_folder_for_the_same_gpu_and_source_and_another_one_for_others(gpu, source, base):
    first = compile_cache.folder_of(DEVICE, str(source))
    gpu(GPU.name)
    again = compile_cache.folder_of(DEVICE, str(source))
    gpu("NVIDIA H100")
    other_gpu = compile_cache.folder_of(DEVICE, str(source))
    gpu(GPU.name)
    source.write_text("pass  # changed")
    other_source = compile_cache.folder_of(DEVICE, str(source))
    assert first == again
    assert len({first, other_gpu, other_source}) == 3
    assert all(below(base, folder) for folder in (first, other_gpu, other_source))


def test_nobody_else_may_enter_it_whatever_the_umask(gpu, source, base):
    before = os.umask(0)
    try:
        folder = compile_cache.folder_of(DEVICE, str(source))
    finally:
        os.umask(before)
    while folder != base.parent:
        assert folder.stat().st_mode & 0o777 == 0o700, folder
        folder = folder.parent


def test_without_a_cache_folder_in_the_environment_it_is_in_the_home(gpu, source, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert below(tmp_path / ".cache", compile_cache.folder_of(DEVICE, str(source)))


def others_may_write(base: Path) -> None:
    (base / "pytest-gpufleet").mkdir(parents=True)
    (base / "pytest-gpufleet").chmod(0o777)


def a_link_in_its_place(base: Path) -> None:
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir()
    base.mkdir()
    (base / "pytest-gpufleet").symlink_to(elsewhere)


def a_file_in_its_place(base: Path) -> None:
    base.mkdir()
    (base / "pytest-gpufleet").touch()


@pytest.mark.parametrize("attack", [others_may_write, a_link_in_its_place, a_file_in_its_place])
def test_what_others_may_have_filled_is_left_alone(gpu, source, base, attack):
    attack(base)
    folder = compile_cache.folder_of(DEVICE, str(source))
    assert not below(base, folder)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(base.parent.glob("elsewhere/*")) == []


def test_a_folder_of_somebody_else_is_left_alone(gpu, source, base, monkeypatch):
    base.mkdir()
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    assert not below(base, compile_cache.folder_of(DEVICE, str(source)))


def test_a_cache_folder_that_is_a_link_of_the_user_is_followed(gpu, source, base, tmp_path):
    (tmp_path / "scratch").mkdir()
    base.symlink_to(tmp_path / "scratch")
    assert below(tmp_path / "scratch", compile_cache.folder_of(DEVICE, str(source)))


def test_inductor_and_triton_are_told(gpu, source, base, monkeypatch):
    for name in (compile_cache.INDUCTOR, compile_cache.TRITON):
        monkeypatch.setenv(name, "/tmp/somewhere")
    compile_cache.use(DEVICE, str(source))
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    assert below(base, Path(cache_dir()))
    assert triton_cache_dir(0) == triton_cache_dir(1)
    assert below(base, Path(triton_cache_dir(0)))
