"""How often each scene of tests/nodes/test_faults_of_nodes.py comes out right: as root, and with nothing else at work.

    python benchmarks/scenes.py 10                 ten times by srun
    python benchmarks/scenes.py 2 --launcher ray   twice by Ray

After each round the table is printed anew, with why a scene came out wrong and where its output is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[1]
# What is done to the nodes, and the tests that do it.
SCENES = {
    "ranks killed": ("test_ranks_are_killed",),
    "agent killed": ("test_an_agent_is_killed",),
    "own run killed": ("test_the_own_run_of_a_node_is_killed",),
    "own run stopped": ("test_the_own_run_of_a_node_hangs",),
    "node frozen 15 s": ("test_a_frozen_node",),
    "cable flapping": ("test_a_cable_that_is_out",),
    "one-way cut": ("test_a_node_that_cannot_be_heard_or_hear",),
    "two nodes cut off from each other": ("test_two_nodes_that_are_cut_off",),
    "firewall on the rendezvous port": ("test_a_node_that_does_not_come",),
    "disk full": ("test_the_disk_of_a_node",),
    "head's launcher daemon killed": ("test_the_launchers_daemon", "test_a_run_survives_all_of_ray"),
    "wrong secret": ("test_who_has_another_secret", "test_another_token_of_ray"),
}
OF_ONE_LAUNCHER = {
    "srun": ("test_the_launchers_daemon", "test_who_has_another_secret", "test_a_node_that_does_not_come"),
    "ray": ("test_a_run_survives_all_of_ray", "test_another_token_of_ray"),
}
OTHER_WAY = "-cable]"  # a way to cut a node off that is no scene of its own


def round_of(launcher: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each scene that was played, with why it came out wrong."""
    own = " or ".join((launcher, *OF_ONE_LAUNCHER[launcher]))
    every = " or ".join(test for tests in SCENES.values() for test in tests)
    report = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "tests/nodes/test_faults_of_nodes.py", "-v", f"--junitxml={report}"]
    command += [f"--basetemp={folder / 'tmp'}", "-k", f"({every}) and ({own})"]
    environment = {**os.environ, "GPUFLEET_ALONE": "1"}
    with (folder / "output.txt").open("w") as output:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    for case in ET.parse(report).iter("testcase"):
        name = case.get("name", "")
        wrong = [each.get("message", "").strip() for each in case if each.tag in ("failure", "error")]
        scene = next((scene for scene, tests in SCENES.items() if name.startswith(tests)), "")
        if scene and OTHER_WAY not in name:
            yield scene, wrong[0].partition("\n")[0][:200] or "it failed" if wrong else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--launcher", choices=("srun", "ray"), default="srun")
    given = parser.parse_args()
    started: Counter[str] = Counter()
    wrong: dict[str, list[str]] = defaultdict(list)
    for number in range(1, given.rounds + 1):
        folder = Path(mkdtemp(prefix=f"scenes-{given.launcher}-{number}-"))
        for scene, why in round_of(given.launcher, folder):
            started[scene] += 1
            if why:
                wrong[scene].append(f"{why} ({folder})")
        print(f"round {number}, by {given.launcher}\n{'scene':<36}{'started':>8}{'right':>8}{'wrong':>8}")
        for scene, times in started.items():
            print(f"{scene:<36}{times:>8}{times - len(wrong[scene]):>8}{len(wrong[scene]):>8}")
            for why in wrong[scene]:
                print(f"    {why}", flush=True)


if __name__ == "__main__":
    main()
