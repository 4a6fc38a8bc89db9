"""Logging of one process, set up once, with its place in every line."""

import logging
import os
import sys

from lockstep.parallel.rank_spec import RankSpec

LEVEL_VARIABLE = "LOCKSTEP_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def setup_logging(who: str, *, level: str | None = None) -> None:
    """Send this package's records to stderr as ``time level [who] module: message``.

    ``level`` None takes LOCKSTEP_LOG_LEVEL, else WARNING. A second call renames the process.

    Raises:
        ValueError: a level that does not exist.
    """
    chosen = (level or os.environ.get(LEVEL_VARIABLE) or "WARNING").upper()
    if chosen not in _LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(_LEVELS)}, got {chosen!r}")
    handler = logging.StreamHandler(sys.stderr)
    form = f"%(asctime)s %(levelname)s [{who}] %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logger = logging.getLogger("lockstep")
    logger.handlers[:] = [handler]
    logger.setLevel(chosen)
    logger.propagate = False


def rank_name(spec: RankSpec) -> str:
    """How messages and logs call a rank."""
    return f"rank {spec.global_rank} (dp {spec.dp_rank} tp {spec.tp_rank}, {spec.device})"
