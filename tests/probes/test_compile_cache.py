"""Where compiled code is kept: in a folder that nobody else can have put anything into, or nowhere."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.probes.training import compile_cache
from pytest_gpufleet.world.engines import held_folders

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


def test_the_sources_that_decide_are_there():
    assert all(Path(source).is_file() for source in compile_cache.SOURCES)


@pytest.fixture
def variables(monkeypatch):
    """The two variables that say where compiled code goes, unset."""
    names = (compile_cache.INDUCTOR, compile_cache.TRITON)
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    return names


def test_inductor_and_triton_are_told(gpu, base, variables):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    for name, of_torch in zip(variables, (cache_dir(), triton_cache_dir(0)), strict=True):
        os.environ[name] = of_torch  # as torch leaves it behind
    compile_cache.use(DEVICE)
    assert below(base, Path(cache_dir()))
    assert triton_cache_dir(0) == triton_cache_dir(1)
    assert below(base, Path(triton_cache_dir(0)))


@pytest.mark.parametrize("given", [0, 1])
def test_where_the_site_has_a_folder_it_is_used(gpu, base, variables, monkeypatch, tmp_path, given):
    monkeypatch.setenv(variables[given], str(tmp_path / "of the site"))
    compile_cache.use(DEVICE)
    assert os.environ[variables[given]] == str(tmp_path / "of the site")
    assert below(base, Path(os.environ[variables[1 - given]]))


def test_where_the_site_has_both_nothing_else_is_made(gpu, base, variables, monkeypatch, tmp_path):
    for name in variables:
        monkeypatch.setenv(name, str(tmp_path / "of the site"))
    compile_cache.use(DEVICE)
    assert not base.exists()


def kept_for(source: Path, base: Path, count: int) -> list[Path]:
    """Folders of so many states of the source, the one that was used longest ago first, and none of them held."""
    folders = []
    for state in range(count):
        source.write_text(f"state = {state}")
        folders.append(compile_cache.own_folder(("pytest-gpufleet", "compiled", "NVIDIA-H200-9.0", f"{state:016x}")))
        os.close(held_folders.share(folders[-1]))
        (folders[-1] / "fxgraph").mkdir()
        os.utime(folders[-1], (state, state))
    return folders


def test_the_folders_used_longest_ago_are_removed_and_those_of_other_gpus_stay(gpu, source, base):
    gpu("NVIDIA H100")
    other = compile_cache.folder_of(DEVICE, str(source))
    gpu(GPU.name)
    folders = kept_for(source, base, compile_cache.KEPT + 1)
    mine = compile_cache.folder_of(DEVICE, str(source))
    assert set(mine.parent.iterdir()) == {mine, *folders[2:]}
    assert len({mine, *folders[2:]}) == compile_cache.KEPT
    assert other.exists()


def test_a_folder_in_which_nothing_can_be_written_is_not_held(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / held_folders.MARKER).symlink_to(held_folders.MARKER)
    with pytest.raises(OSError, match="symbolic links"):
        held_folders.share(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_a_folder_used_again_is_the_newest(gpu, source, base):
    first = compile_cache.folder_of(DEVICE, str(source))
    os.utime(first, (0, 0))
    state = source.read_text()
    others = kept_for(source, base, compile_cache.KEPT)
    source.write_text(state)
    gpu(GPU.name)
    assert compile_cache.folder_of(DEVICE, str(source)) == first
    assert set(first.parent.iterdir()) == {first, *others[1:]}


def a_link(folder: Path) -> None:
    elsewhere = folder.parents[3] / "elsewhere"
    shutil.move(folder, elsewhere)
    folder.symlink_to(elsewhere)
    os.utime(folder, (0, 0), follow_symlinks=False)


def open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


def not_made_here(folder: Path) -> None:
    (folder / held_folders.MARKER).unlink()
    os.utime(folder, (0, 0))


@pytest.mark.parametrize("attack", [a_link, open_to_others, not_made_here])
def test_what_may_not_be_ours_is_not_removed(gpu, source, base, attack):
    oldest, next_oldest, *_ = kept_for(source, base, compile_cache.KEPT + 1)
    attack(oldest)
    compile_cache.folder_of(DEVICE, str(source))
    assert (oldest / "fxgraph").exists()
    assert not next_oldest.exists()


def test_what_another_process_uses_is_not_removed(gpu, source, base):
    oldest, *_ = kept_for(source, base, compile_cache.KEPT)
    program = "import sys; from pathlib import Path; from pytest_gpufleet.world.engines import held_folders\n"
    program += "held_folders.share(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(oldest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        os.utime(oldest, (0, 0))
        compile_cache.folder_of(DEVICE, str(source))
        stayed = oldest.exists()
        other.stdin.close()
    gpu(GPU.name)
    compile_cache.folder_of(DEVICE, str(source))
    assert stayed
    assert not oldest.exists()
