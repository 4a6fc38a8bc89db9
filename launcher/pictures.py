"""Figures that are saved as files. matplotlib is an extra: it is loaded only here."""

from importlib import import_module
from pathlib import Path
from typing import Any

_DOTS_PER_INCH = 120


def check_picture(path: Path) -> None:
    """Raise ValueError if matplotlib is missing, or the file's ending is not .png."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot must be a file that ends in .png, got {path}")
    try:
        import_module("matplotlib.figure")
    except ImportError:
        raise ValueError(
            f"plot {path} needs matplotlib, which is not installed: "
            "pip install 'lockstep-decode[plot]'"
        ) from None


def new_figure(path: Path, inches: tuple[float, float]) -> Any:
    """A matplotlib Figure to draw on, to be saved to ``path``; raises as ``check_picture``."""
    check_picture(path)
    from matplotlib.figure import Figure

    return Figure(figsize=inches, dpi=_DOTS_PER_INCH, layout="constrained")
