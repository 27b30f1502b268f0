"""How a check ends that neither passes nor fails. Loaded in every pytest run, so it needs nothing."""

from typing import NoReturn


class NotApplicable(BaseException):
    """The hardware has no such thing, which leaves nothing open. No failure: no `except Exception` takes it for one."""


# Of checks that nobody asked for: what they would need was not given.
NO_ORDER = "no --fleet-order was given"
NO_RETURN = "no --fleet-returns was given"
NO_DISK_FOLDER = "no folder for it was named: --fleet-disk-folder DIR, on the drive that is to be tested"
NOT_ASKED = tuple(f"not applicable: {reason}" for reason in (NO_ORDER, NO_RETURN, NO_DISK_FOLDER))


def not_applicable(reason: str) -> NoReturn:
    """End a test, in the controller or on a rank, because what it checks does not exist here."""
    __tracebackhide__ = True
    raise NotApplicable(f"not applicable: {reason}")


NOT_JUDGED = "not judged: "  # before the reason


class NotJudged(BaseException):
    """What the check looks at cannot be seen here, which makes a verdict INCOMPLETE. No failure either."""


def not_judged(reason: str) -> NoReturn:
    """End a test, in the controller or on a rank, because what it checks cannot be seen."""
    __tracebackhide__ = True
    raise NotJudged(f"{NOT_JUDGED}{reason}")


class Refused(Exception):
    """What somebody has to know or change, in one sentence: a usage error of pytest, or exit status 1."""
