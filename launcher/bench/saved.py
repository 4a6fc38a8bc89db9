"""A run as ``--output`` writes it and ``--compare`` and ``--plot`` read it."""

from pathlib import Path
from typing import Any

import msgspec

from lockstep.launcher.bench.metrics import Summary
from lockstep.launcher.bench.records import RequestRecord


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """``options`` are those that differ from the defaults, so that a run can be repeated."""

    label: str
    options: dict[str, Any]
    summary: Summary
    requests: list[RequestRecord]


def save_run(run: Run, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(run) + b"\n")


def load_run(path: Path) -> Run:
    """Raises ValueError if the file is no saved run; names it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no saved run: {error}") from None
