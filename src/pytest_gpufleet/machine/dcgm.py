"""NVIDIA's own diagnostic, `dcgmi diag` of the Data Center GPU Manager (DCGM): how it is run, and what it found. DCGM
3.3.9 writes its JSON in dcgmi/Diag.cpp (HelperJsonAddResult), DCGM 4 has a schema (its source, testing/python3/
dcgm_diag_schema.json): it renamed the outermost name, and has an entity where 3 had a GPU. Who looks for the old names
finds no test, and so none that failed: what is not known here counts as not seen."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytest_gpufleet.machine.tools import Ended, HostFact, Unreadable, ended
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE, Gpu, Where

# By the level of `dcgmi diag -r`. NVIDIA's manual says 2, 30 and 60 to 120 minutes for them (DCGM User Guide, "Run
# Levels and Tests"); what goes on for twice as long, or for 15 minutes, hangs.
SECONDS = {2: 900.0, 3: 3600.0, 4: 14400.0}
# dcgmi ends with what its library returned, as an unsigned byte (DCGM, dcgmlib/dcgm_structs.h).
NO_HOST_ENGINE = 256 - 21  # DCGM_ST_CONNECTION_NOT_VALID


@dataclass(frozen=True)
class Printed:
    """By dcgmi, which ended with `status`: its JSON; None if it is none, and then `said` is its last line."""

    level: int
    status: int
    document: Any = None
    said: str = ""


def read(level: int, run: Ended = ended) -> Printed:
    """It works on all GPUs of this machine, which nothing else should use meanwhile."""
    status, out, errors = run("dcgmi", "diag", "-r", str(level), "-j", seconds=SECONDS[level])
    if status == NO_HOST_ENGINE:
        raise Unreadable("the host engine of DCGM does not answer", "systemctl start nvidia-dcgm")
    try:
        return Printed(level, status, json.loads(out))
    except (ValueError, RecursionError):
        return Printed(level, status, None, next(iter((errors or out).strip().splitlines()[-1:]), ""))


def diagnostic(level: int) -> HostFact[Printed]:
    return HostFact("dcgm", Printed, partial(read, level), subject="dcgm", on_request=True)


OUTERMOST = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # of DCGM 4, and of versions before
SETTINGS = "Deployment"  # the category of tests that look at software and settings, and at no hardware
# dcgmErrorSeverity_t (DCGM, dcgmlib/dcgm_errors.h). 0 is none, 3 unknown; versions before 3.3 have none.
SHOWN = "dcgm_warning"
SEVERITIES = {2: "dcgm_part_broken", 6: "dcgm_reset_needed", 4: "dcgm_test_failed", 5: "dcgm_setting", 1: SHOWN}
WORST_FIRST = list(SEVERITIES.values())
# dcgmi's exit statuses: all well, an error was reported (DCGM_ST_NVVS_ERROR), one that calls for isolation.
WELL, REPORTED, ISOLATE = 0, 256 - 30, 256 - 51


@dataclass
class Diagnosis:
    """`faults` speak against the machine, `shown` against nothing; `unseen` says why more may be wrong than that."""

    places: Mapping[str, Where] = field(default_factory=dict)  # of GPUs, by DCGM's number of them
    faults: list[Fault] = field(default_factory=list)
    shown: list[Fault] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # of tests of the hardware
    tested: set[str] = field(default_factory=set)  # DCGM's numbers of GPUs of which a test of the hardware passed

    @property
    def skipped(self) -> bool:
        """Whether no test of the hardware ran at all, which is so on GPUs that DCGM does not know."""
        return not self.unseen and not self.faults and set(self.outcomes) == {"Skip"}


def diagnosed(printed: Printed, gpus: Sequence[Gpu]) -> Diagnosis:
    """`gpus`: all of the machine, known by serial number: DCGM has its own numbers. Else the node is to blame."""
    if (document := printed.document) is None:
        said = f": {printed.said}" if printed.said else ""
        return Diagnosis(unseen=[f"dcgmi ended with status {printed.status} and printed no JSON{said}"])
    at, found = {str(gpu.serial): gpu.place for gpu in gpus if gpu.serial}, Diagnosis()
    try:
        own = _serials(document)
        times = Counter(own.values())
        found.places = {number: at[each] for number, each in own.items() if each in at and times[each] == 1}
        for category, test in _tests(document):
            results, summary = [*test["results"]], test.get("test_summary", {})
            if summary.get("status") == "Fail" and not any(result["status"] == "Fail" for result in results):
                results.append(summary)  # of no GPU alone
            for result in results:
                _result(category, test["name"], result, found)
            found.unseen += [] if results else [f"{test['name']} has no result"]
    except (TypeError, KeyError, AttributeError, ValueError) as why:
        found.unseen.append(f"its JSON is not as DCGM 3 or 4 writes it: {why or type(why).__name__}")
    _whole(printed.status, found, len(gpus))
    return found


def _serials(document: Mapping[str, Any]) -> dict[str, str]:
    found = dict(document.get("GPU Device Serials") or {})  # of DCGM 3
    for group in document.get("entity_groups") or ():
        if group.get("entity_group") == "GPU":
            found |= {each.get("entity_id"): each.get("serial_num") for each in group.get("entities") or ()}
    return {str(number): str(serial) for number, serial in found.items()}


def _tests(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    whole = next((document[name] for name in OUTERMOST if name in document), None)
    if whole is None:
        raise ValueError(f"it has neither {' nor '.join(map(repr, OUTERMOST))}")
    if why := whole.get("runtime_error"):
        raise ValueError(f"the diagnostic could not run: {' '.join(str(why).split())}")
    for category in whole["test_categories"]:
        # Where DCGM 3 has a test that it no longer runs, there is null.
        yield from ((category["category"], test) for test in category["tests"] if test is not None)


def _result(category: str, name: str, result: Mapping[str, Any], found: Diagnosis) -> None:
    status, warnings = str(result["status"]), list(map(_warning, result.get("warnings") or ()))
    number, of_hardware = _number(result, len(warnings)), category != SETTINGS
    place = found.places.get(number or "", THIS_NODE)
    of = f" (DCGM's GPU {number})" if number and place == THIS_NODE else ""
    texts = "; ".join(dict.fromkeys(text for _, text in warnings))
    more = f": {texts}" if texts else ""
    if of_hardware:
        found.outcomes[status] += 1
    if status == "Fail":
        code = min((code for code, _ in warnings), key=WORST_FIRST.index, default="dcgm_test_failed")
        (found.shown if code == SHOWN else found.faults).append(Fault(code, (place,), f"{name} failed{of}{more}"))
    elif status in ("Pass", "Skip"):
        if of_hardware and status == "Pass" and number:
            found.tested.add(number)
        words = "passed with a warning" if status == "Pass" else "was skipped"
        if texts or (status == "Skip" and of_hardware):
            found.shown.append(Fault(SHOWN, (place,), f"{name} {words}{of}{more}"))
    else:
        texts = f", {texts}" if texts else ""
        found.unseen.append(f"{name} has the status {status!r}{texts}, which is not known")


def _number(result: Mapping[str, Any], warnings: int) -> str | None:
    """Of the one GPU that a result is of. DCGM 3 has the last one that it warned of where a test looks at all."""
    if "entity_group" in result:
        return str(result["entity_id"]) if result["entity_group"] == "GPU" else None
    number = result.get("gpu_id", result.get("gpu_ids"))  # before 3.0 by the second name, which may hold several
    return str(number) if str(number).isdecimal() and warnings <= 1 else None


def _warning(warning: Any) -> tuple[str, str]:
    """The code of its severity and its text, which DCGM 3 has under another name in tests of settings."""
    if isinstance(warning, str):
        return "dcgm_test_failed", warning
    text = warning.get("warning", warning.get("warnings"))
    return SEVERITIES.get(warning.get("error_severity"), "dcgm_test_failed"), str(text)


def _whole(status: int, found: Diagnosis, gpus: int) -> None:
    """What keeps a diagnosis from being one of the whole machine."""
    known = bool(found.faults or found.shown)
    if status not in (WELL, REPORTED, ISOLATE) or (status == ISOLATE and not found.faults) or (status and not known):
        found.unseen.append(f"dcgmi ended with status {status}, and its JSON does not say why")
    if not found.unseen and not found.faults:
        if not found.outcomes:
            found.unseen.append("it has no test of the hardware")
        elif found.outcomes["Pass"] and len(found.tested) < gpus:
            found.unseen.append(f"it tested {len(found.tested)} GPUs, and there are {gpus}")
