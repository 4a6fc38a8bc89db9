"""Which requests of an engine have not ended, so that each ends once, whatever happens."""

from lockstep.comm.messages import AddRequest, TokenDelta, lost_request


class InFlight:
    """Requests between their ``add`` and the delta with their finish_reason, in order."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._req_ids: dict[str, None] = {}
        self._ended = False

    def add(self, request: AddRequest) -> None:
        """Raise ValueError if the id is in use, so that its deltas could not be told apart."""
        if request.req_id in self._req_ids:
            raise ValueError(f"req_id must not be in use, got {request.req_id!r} twice")
        self._req_ids[request.req_id] = None

    def seen(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Note which requests end in ``deltas``; returns the deltas."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self.num_errors += delta.finish_reason == "error"
                self._req_ids.pop(delta.req_id, None)
        return deltas

    def end(self, error: str) -> list[TokenDelta]:
        """The last deltas of all requests in flight when an engine has died; once, then none."""
        lost = [] if self._ended else list(self._req_ids)
        self._ended = True
        return self.seen([lost_request(each, error) for each in lost])
