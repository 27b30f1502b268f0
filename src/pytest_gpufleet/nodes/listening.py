"""How long somebody was listened to in vain."""


class Listening:
    """`seconds` that this process has listened. It reads no clock.

    A process that is frozen (SIGSTOP, a debugger, a host that swaps) hears nobody, and what was sent meanwhile still
    lies in its buffers. So of the time between two looks no more counts than `longest`, which it waits between them.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked: float | None = None
        self.seconds = 0.0

    def look(self, now: float) -> None:
        """This process reads, at `now`, all that has come."""
        if self._looked is not None:
            self.seconds += min(max(0.0, now - self._looked), self._longest)
        self._looked = now
