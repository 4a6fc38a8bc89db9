"""Requests whose grammar is being compiled: they wait for it before they wait for blocks."""

from collections.abc import Iterator
from concurrent.futures import Future

from lockstep.comm.messages import AddRequest, TokenDelta, unpack_ids
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.grammars.grammar import GrammarError
from lockstep.worker.grammars.matcher import Matcher
from lockstep.worker.request import Request


class Compiling:
    """Never waits: who is done is asked for.

    Args:
        compiler: None where grammars are not served.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._started: dict[str, tuple[Request, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._started)

    def start(self, add: AddRequest, request: Request) -> None:
        """Begin. Raises ValueError: grammars are not served here."""
        sampling = add.sampling
        assert sampling.structured_outputs is not None
        if self._compiler is None:
            raise ValueError("structured_outputs are not served: the scheduler has no compiler")
        matcher = self._compiler.start(
            sampling.structured_outputs, unpack_ids(add.stop_ids), sampling.stop_token_ids
        )
        self._started[request.req_id] = request, matcher

    def remove(self, request: Request) -> None:
        self._started.pop(request.req_id, None)

    def take_done(self) -> Iterator[tuple[Request, TokenDelta | None]]:
        """Those that have their matcher now, and those that cannot have one, with their end."""
        for request, matcher in [each for each in self._started.values() if each[1].done()]:
            self.remove(request)
            error = matcher.exception()
            if error is None:
                request.matcher = matcher.result()
            yield request, None if error is None else _failure(request, error)


def _failure(request: Request, error: BaseException) -> TokenDelta:
    return TokenDelta(
        request.req_id,
        finish_reason="error",
        error=f"structured_outputs: {error}",
        dp_rank=request.replica,
        bad_request=isinstance(error, GrammarError),
    )
