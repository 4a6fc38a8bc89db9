"""Failures that end a run, each with the exit code a caller of the command sees.

0 all requests were answered, or a server was told to stop; 1 some request ended with an error, or
an unforeseen failure; 2 bad flags or configuration; then the codes below; 130 interrupted, 141
nobody reads the answers, 143 terminated.
"""


class LaunchError(RuntimeError):
    """The run cannot start or cannot go on."""

    exit_code = 1


class ConfigError(LaunchError, ValueError):
    """Flags or files that cannot work; the message names field, value and limit."""

    exit_code = 2


class PlacementError(LaunchError):
    """The cluster cannot hold the ranks; the message has needed, present, and held by whom."""

    exit_code = 3


class EngineDead(LaunchError):
    """A rank or the scheduler was lost or failed while serving; the message says which and why."""

    exit_code = 4


class StartError(LaunchError):
    """No rank can serve: the model, memory, a capture, or a Ray that does not start or take us."""

    exit_code = 5
