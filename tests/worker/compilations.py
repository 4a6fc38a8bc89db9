"""Which Triton kernels get compiled while something runs: none may be, once a worker serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the name of every kernel that is compiled, or loaded for the first time, inside."""
    from triton import knobs

    names: list[str] = []

    def note(**event: Any) -> None:
        names.append(event["fn"].name)

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
