"""Graph modes, what attention supports, and how one becomes the other (pure, no torch)."""

from enum import IntEnum, StrEnum
from typing import NamedTuple


class RunMode(IntEnum):
    """How one step runs. Ranks that differ agree on the least."""

    EAGER = 0
    PIECEWISE = 1
    FULL = 2


class AttentionSupport(IntEnum):
    """What an attention backend can do inside a graph; over all layers the least decides."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class GraphMode(StrEnum):
    """The configured mode: which graphs serve decode batches and which serve mixed ones."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode(self) -> RunMode:
        """Best run mode of a uniform decode batch."""
        return _PARTS[self][0]

    @property
    def mixed(self) -> RunMode:
        """Best run mode of any other batch."""
        return _PARTS[self][1]

    @property
    def has_piecewise(self) -> bool:
        return RunMode.PIECEWISE in _PARTS[self]


_PARTS = {
    GraphMode.NONE: (RunMode.EAGER, RunMode.EAGER),
    GraphMode.PIECEWISE: (RunMode.PIECEWISE, RunMode.PIECEWISE),
    GraphMode.FULL: (RunMode.FULL, RunMode.FULL),
    GraphMode.FULL_DECODE_ONLY: (RunMode.FULL, RunMode.EAGER),
    GraphMode.FULL_AND_PIECEWISE: (RunMode.FULL, RunMode.PIECEWISE),
}

_LEVELS = (
    GraphMode.NONE,
    GraphMode.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
)


class ResolvedMode(NamedTuple):
    """A mode that can run here, and one reason for every step down from the requested one."""

    mode: GraphMode
    reasons: tuple[str, ...]


def mode_of_level(level: int) -> GraphMode:
    """Default mode of optimisation level ``-O<level>``."""
    if not 0 <= level < len(_LEVELS):
        raise ValueError(f"optimisation level must be in [0, {len(_LEVELS) - 1}], got {level}")
    return _LEVELS[level]


def requested_mode(mode: str | None, level: int | None) -> GraphMode:
    """What a user asked for: a mode, or else that of an optimisation level."""
    if mode is not None:
        return _checked(mode)
    return GraphMode.FULL_AND_PIECEWISE if level is None else mode_of_level(level)


def resolve_mode(
    requested: str, support: AttentionSupport, query_len: int, piecewise_available: bool
) -> ResolvedMode:
    """The mode that can run, from the one asked for.

    Args:
        requested: a ``GraphMode`` or its name.
        support: the least level over all attention layers.
        query_len: tokens per request of a uniform decode batch.
        piecewise_available: the model offers split points.

    Raises:
        ValueError: ``requested`` is no mode, or FULL is asked of attention that never captures.
    """
    mode, reasons = _checked(requested), list[str]()
    for rule in (_mixed_rule, _decode_rule, _piecewise_rule):
        lowered, reason = rule(mode, support, query_len, piecewise_available)
        if lowered is not mode:
            reasons.append(f"{mode} -> {lowered}: {reason}")
            mode = lowered
    return ResolvedMode(mode, tuple(reasons))


def _checked(requested: str) -> GraphMode:
    try:
        return GraphMode(requested)
    except ValueError:
        names = ", ".join(GraphMode)
        raise ValueError(f"cudagraph_mode must be one of {names}, got {requested!r}") from None


def _mixed_rule(
    mode: GraphMode, support: AttentionSupport, query_len: int, split: bool
) -> tuple[GraphMode, str]:
    if mode.mixed is not RunMode.FULL or support is AttentionSupport.ALWAYS:
        return mode, ""
    if support is AttentionSupport.NEVER:
        raise ValueError(
            f"cudagraph_mode FULL needs attention that can be captured, but support is "
            f"{support.name}: ask for PIECEWISE or NONE, or choose another attention backend"
        )
    lowered = GraphMode.FULL_AND_PIECEWISE if split else GraphMode.FULL_DECODE_ONLY
    return lowered, f"mixed batches need attention support ALWAYS, got {support.name}"


def _decode_rule(
    mode: GraphMode, support: AttentionSupport, query_len: int, split: bool
) -> tuple[GraphMode, str]:
    need = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if query_len > 1:
        need = AttentionSupport.UNIFORM_BATCH
    if mode.decode is not RunMode.FULL or support >= need:
        return mode, ""
    lowered = GraphMode.PIECEWISE if split else GraphMode.NONE
    return lowered, (
        f"decode batches of query_len {query_len} need attention support {need.name}, "
        f"got {support.name}"
    )


def _piecewise_rule(
    mode: GraphMode, support: AttentionSupport, query_len: int, split: bool
) -> tuple[GraphMode, str]:
    if split or not mode.has_piecewise:
        return mode, ""
    lowered = GraphMode.NONE if mode is GraphMode.PIECEWISE else GraphMode.FULL_DECODE_ONLY
    return lowered, "the model offers no split points"
