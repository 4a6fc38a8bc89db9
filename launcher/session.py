"""Many requests through one engine: keeps it fed, collects what comes back."""

from collections.abc import Iterable, Iterator

import msgspec

from lockstep.comm.messages import TokenDelta
from lockstep.launcher.engine import EngineClient
from lockstep.launcher.inputs import BadInput
from lockstep.launcher.outputs import OutputAssembler, RequestOutput
from lockstep.launcher.prepare import Submission
from lockstep.launcher.tokenize import AnyTokenizer

POLL_S = 0.5


class Progressed(msgspec.Struct, frozen=True):
    """Something happened to request ``index``: text to show, and its output once it is done."""

    index: int
    prompt: str | None
    text: str = ""
    num_tokens: int = 0
    output: RequestOutput | None = None


class Session:
    """Sends requests in order and yields what happens, at most ``window`` in flight.

    Request ids carry a prefix, so several sessions may share an engine.
    """

    def __init__(
        self, engine: EngineClient, tokenizer: AnyTokenizer, *, window: int, prefix: str = "r"
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._window = window
        self._prefix = prefix
        self._in_flight: dict[str, OutputAssembler] = {}

    def run(self, submissions: Iterable[Submission]) -> Iterator[Progressed]:
        """Every submission ends in exactly one ``Progressed`` with an output.

        Raises:
            EngineDead: a rank or the scheduler is lost.
        """
        waiting = enumerate(submissions)
        more = True
        while more or self._in_flight:
            while more and len(self._in_flight) < self._window:
                item = next(waiting, None)
                more = item is not None
                if item is not None:
                    yield from self._submit(*item)
            if self._in_flight:
                yield from self._poll()

    def abort_all(self) -> None:
        """Give up what is in flight; the engine goes on with others'."""
        for req_id in self._in_flight:
            self._engine.abort(req_id)
        self._in_flight.clear()

    def _submit(self, index: int, submission: Submission) -> Iterator[Progressed]:
        if isinstance(submission, BadInput):
            yield Progressed(index, submission.prompt, output=_refused(index, submission))
            return
        req_id = f"{self._prefix}{index}"
        self._in_flight[req_id] = OutputAssembler(index, submission, self._tokenizer)
        self._engine.add(submission.to_add(req_id))

    def _poll(self) -> Iterator[Progressed]:
        for delta in self._engine.poll(POLL_S):
            assembler = self._in_flight.get(delta.req_id)
            # Tokens of a request that a stop string has ended may still be on their way.
            if assembler is not None:
                yield self._take(assembler, delta)

    def _take(self, assembler: OutputAssembler, delta: TokenDelta) -> Progressed:
        piece = assembler.push(delta)
        done = assembler.finish_reason is not None
        if done:
            del self._in_flight[delta.req_id]
        if assembler.stopped_here:
            self._engine.abort(delta.req_id)
        return Progressed(
            index=assembler.index,
            prompt=assembler.prompt,
            text=piece.text,
            num_tokens=len(piece.token_ids),
            output=assembler.output() if done else None,
        )


def run_all(session: Session, submissions: Iterable[Submission]) -> list[RequestOutput]:
    """Outputs in order, once all are done; nothing is in flight when this ends.

    Raises:
        EngineDead: a rank or the scheduler is lost.
    """
    try:
        events = session.run(submissions)
        return list(in_order(event.output for event in events if event.output is not None))
    finally:
        session.abort_all()


def _refused(index: int, bad: BadInput) -> RequestOutput:
    return RequestOutput(index=index, prompt=bad.prompt, finish_reason="error", error=bad.error)


def in_order(outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """The same outputs by index from 0 on, each as soon as those before it are out."""
    held: dict[int, RequestOutput] = {}
    next_index = 0
    for output in outputs:
        held[output.index] = output
        while next_index in held:
            yield held.pop(next_index)
            next_index += 1
