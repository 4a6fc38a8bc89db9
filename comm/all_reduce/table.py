"""Which all-reduce for which size, as data that can be fixed, hashed and compared. No torch.

In text a table reads ``one_shot:65536,two_shot:4194304,nccl``: one-shot up to 64 KiB, two-shot up
to 4 MiB, NCCL above.
"""

from typing import NamedTuple

# Those that a device has.
ALGORITHMS = {"cpu": ("gloo",), "cuda": ("nccl", "one_shot", "two_shot")}


class Choice(NamedTuple):
    """``algorithm`` serves tensors of at most ``max_bytes``; None is without limit."""

    algorithm: str
    max_bytes: int | None


def parse_table(text: str) -> tuple[Choice, ...]:
    """Read a table. Raises ValueError unless limits rise and the last entry has none."""
    choices = tuple(_parse_choice(text, entry) for entry in text.split(","))
    limits = [choice.max_bytes for choice in choices[:-1]]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits) or known != sorted(set(known)) or choices[-1].max_bytes is not None:
        raise ValueError(
            f"all_reduce must be NAME or NAME:BYTES,...,NAME with rising BYTES, got {text!r}"
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


def _parse_choice(text: str, entry: str) -> Choice:
    name, colon, limit = entry.strip().partition(":")
    if not name.isidentifier() or (colon and not limit.isdecimal()):
        raise ValueError(f"all_reduce must be NAME or NAME:BYTES, got {entry!r} in {text!r}")
    return Choice(name, int(limit) if colon else None)
