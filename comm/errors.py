"""Errors of the communication layer, each naming the rank or the wire that failed."""


class CommError(RuntimeError):
    """Something between ranks or processes failed; a group that saw one stays failed."""


class PeerLost(CommError):
    """A rank of a group is gone or no longer answers.

    Args:
        global_rank: the rank that is lost.
        detail: what was being done when it was noticed.
    """

    def __init__(self, global_rank: int, detail: str) -> None:
        super().__init__(f"rank {global_rank} is lost: {detail}")
        self.global_rank = global_rank
        self.detail = detail

    def __reduce__(self) -> tuple[type["PeerLost"], tuple[int, str]]:
        return PeerLost, (self.global_rank, self.detail)


class CommTimeout(CommError):
    """A collective or a ring read passed its deadline."""


class RankMismatch(CommError):
    """Ranks that must agree do not; the message names rank, what was compared, first difference."""


class WireError(CommError):
    """A message could not be read: other wire version, unknown tag, or damaged bytes."""
