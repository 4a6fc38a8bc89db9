"""Which all-reduce for which size, as data that can be fixed, hashed and compared. No torch.

In text a table reads ``fused:262144,one_shot:65536,two_shot:4194304,nccl``: a sum that a norm
follows is one kernel with it up to 256 KiB; other sums are one-shot up to 64 KiB, two-shot up to
4 MiB, NCCL above.
"""

from typing import NamedTuple

# Those that a device has.
ALGORITHMS = {"cpu": ("gloo",), "cuda": ("nccl", "one_shot", "two_shot", "fused")}
# Serves only sums that a norm follows, so it stands before the others with a limit of its own.
FUSED = "fused"


class Choice(NamedTuple):
    """``algorithm`` serves tensors of at most ``max_bytes``; None is without limit."""

    algorithm: str
    max_bytes: int | None

    def __str__(self) -> str:
        return self.algorithm if self.max_bytes is None else f"{self.algorithm}:{self.max_bytes}"


def parse_table(text: str) -> tuple[Choice, ...]:
    """Read a table. Raises ValueError unless limits rise and the last entry has none."""
    choices = tuple(_parse_choice(text, entry) for entry in text.split(","))
    sums = choices[1:] if choices[0].algorithm == FUSED else choices
    names, limits = [name for name, _ in choices[1:]], [limit for _, limit in sums[:-1]]
    known = [limit for limit in limits if limit is not None]
    rising = len(known) == len(limits) and known == sorted(set(known))
    if not sums or not rising or sums[-1].max_bytes is not None or FUSED in names:
        raise ValueError(
            "all_reduce must be NAME or NAME:BYTES,...,NAME with rising BYTES, before which "
            f"{FUSED}:BYTES may stand, got {text!r}"
        )
    return choices


def check_table(text: str, device_type: str) -> None:
    """Raise ValueError unless it is "auto" or a table of what a "cpu" or "cuda" device has."""
    known = ALGORITHMS[device_type]
    for name, _ in () if text == "auto" else parse_table(text):
        if name not in known:
            raise ValueError(
                f"all_reduce must be auto or of {', '.join(known)} on {device_type}, got {name!r}"
            )


def fused_bytes(choices: tuple[Choice, ...]) -> int:
    """The largest tensor of a sum that is one kernel with its norm; 0 if none is."""
    return next((limit or 0 for name, limit in choices if name == FUSED), 0)


def without_fused(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    return tuple(choice for choice in choices if choice.algorithm != FUSED)


def _parse_choice(text: str, entry: str) -> Choice:
    name, colon, limit = entry.strip().partition(":")
    if not name.isidentifier() or (colon and not limit.isdecimal()):
        raise ValueError(f"all_reduce must be NAME or NAME:BYTES, got {entry!r} in {text!r}")
    return Choice(name, int(limit) if colon else None)
