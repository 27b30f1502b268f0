"""benchmarks/against.py: which of two packages a benchmark measures, and when it calls a change one."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# A benchmark whose only figure is the one that the package holds, of which pytest would load the plugin too.
HELD = """
from importlib.metadata import entry_points
import pytest_gpufleet

def figures(arguments):
    plugins = [each.value for each in entry_points(group="pytest11") if each.name == "gpufleet"]
    assert plugins[0] == pytest_gpufleet.PLUGIN, plugins
    return {"held": pytest_gpufleet.HELD * float(arguments[0])}
"""
PROJECT = '[project]\nname = "x"\n[project.entry-points.pytest11]\ngpufleet = "{}"\n'


@pytest.fixture(scope="module")
def against():
    sys.path.insert(0, str(BENCHMARKS))
    yield __import__("against")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("now", "ratio", "agreed"),
    [((12.0, 11.0, 13.0), 1.2, "higher"), ((9.0, 8.0, 7.0), 0.8, "lower"), ((12.0, 9.0, 13.0), 1.2, "")],
)
def test_a_change_is_one_where_all_turns_say_so(against, now, ratio, agreed):
    cells = [each.strip() for each in against.row("time, s", (10.0, 10.0, 10.0), now).strip("|").split("|")]
    assert cells[0] == "time, s"
    assert cells[1] == "10 / 10 / 10"
    assert float(cells[3]) == ratio
    assert cells[-1] == agreed


def test_each_package_is_measured_by_the_same_benchmark(monkeypatch, tmp_path, against):
    """Also where another one is installed, and where the plugin had another name."""
    monkeypatch.setattr(against, "HERE", tmp_path)
    (tmp_path / "held.py").write_text(HELD)
    for held, plugin in ((3, "pytest_gpufleet.old"), (5, "pytest_gpufleet.new")):
        package = tmp_path / plugin / "src" / "pytest_gpufleet"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"HELD, PLUGIN = {held}, {plugin!r}\n")
        (tmp_path / plugin / "pyproject.toml").write_text(PROJECT.format(plugin))
        variables = against.environment(tmp_path / plugin, tmp_path / f"about {plugin}")
        assert against.sample("held", ["2"], variables) == {"held": 2 * held}
    with pytest.raises(SystemExit, match="held does not run with"):
        against.sample("held", [], variables)


def test_both_packages_are_compiled_the_one_of_a_commit_as_it_was_then(monkeypatch, tmp_path, against):
    clone = tmp_path / "clone"
    package = clone / "src" / "pytest_gpufleet"
    for path, text in (
        (package / "__init__.py", "HELD = 3\n"), (clone / "acceptance/conftest.py", ""),
        (clone / "pyproject.toml", PROJECT),
    ):  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git = ["git", "-C", str(clone), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "before"]):
        subprocess.run([*git, *arguments], check=True)
    (package / "__init__.py").write_text("HELD = 5\n")
    monkeypatch.setattr(against, "ROOT", clone)
    for tree, held in ((against.archived("HEAD", tmp_path / "before"), 3), (against.copied(tmp_path / "now"), 5)):
        assert [*tree.rglob("*.pyc")]
        assert (tree / "src" / "pytest_gpufleet" / "__init__.py").read_text() == f"HELD = {held}\n"
        assert (tree / "pyproject.toml").exists()
    assert not [*clone.rglob("*.pyc")]
