"""Why there is no run, or why a command does nothing."""


class Refused(Exception):
    """What somebody has to know or to change, in one sentence. The plugin makes a usage error of it, the command line
    an exit status of 1."""
