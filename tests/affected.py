"""The tests of modules that changed since the last commit, but those that start pytest: `make quick` runs them too."""

import re
import subprocess

from tests.test_structure import MODULES, SRC, imports

STARTING = re.compile(
    r"\b(run_pytest|run_fresh|in_a_session|planted|on_ranks|(two|three|four)_(ranks|nodes)|Pool|subprocess)\b"
    r"|\bfleet: (Runs|Callable)|\(fleet\b"
)

if __name__ == "__main__":
    tests, git = SRC.with_name("tests"), ["git", "-C", str(SRC), "diff", "--name-only", "--relative", "HEAD"]
    files = subprocess.run(git, capture_output=True, text=True).stdout.split()
    changed = {name for name, path in MODULES.items() if str(path.relative_to(SRC)) in files}
    for path in sorted(tests.rglob("test_*.py")):
        if imports(path) & changed and not STARTING.search(path.read_text(encoding="utf-8")):
            print(path.relative_to(SRC.parent))
