"""How many ranks there are and along which axes."""

from typing import Literal

import msgspec

DpLockstep = Literal["auto", "always", "never"]


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the axes. ``dp_lockstep`` says which replicas must take every step together.

    Raises:
        ValueError: an axis size below 1.
    """

    tp_size: int = 1
    dp_size: int = 1
    dp_lockstep: DpLockstep = "auto"
    verify_agreement: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in ("tp_size", "dp_size"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")

    @property
    def world_size(self) -> int:
        return self.tp_size * self.dp_size

    @property
    def lockstep_dp_size(self) -> int:
        """Replicas per lockstep group: all of them with ``always``, else one (dense models)."""
        return self.dp_size if self.dp_lockstep == "always" else 1
