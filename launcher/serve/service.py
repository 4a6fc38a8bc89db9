"""Everything that a call needs once the engine can serve."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.front_end import FrontEnd
from lockstep.launcher.inputs import KINDS, PromptInput
from lockstep.launcher.metrics.requests import RequestMetrics
from lockstep.launcher.prepare import PreparedRequest, Preparer
from lockstep.launcher.serve.admission import Admission
from lockstep.launcher.serve.api_errors import ApiError, refused_value
from lockstep.launcher.serve.engine_loop import Inbox
from lockstep.launcher.serve.generation import Generation
from lockstep.launcher.serve.router import Router
from lockstep.launcher.structured import RESPONSE_FORMAT, asks_structure
from lockstep.launcher.tokenize import AnyTokenizer
from lockstep.worker.schedule.checks import Limits, check_request
from lockstep.worker.schedule.stats import SchedulerStats

T = TypeVar("T")

COMPLETION_MAX_TOKENS = 16
# What errors of prompts and sampling parameters begin with.
NAMED = (*KINDS, *SamplingParams.__struct_fields__, RESPONSE_FORMAT)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/v1/models`` tells; ``root`` is where the weights come from."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "lockstep"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


@dataclass(frozen=True)
class Service:
    """A model behind its engine, as the handlers of calls see it; they share one thread.

    ``cards``: one for each name of the model.
    ``completion`` and ``chat`` prepare prompts with the defaults of their API.
    """

    cards: Sequence[ModelCard]
    tokenizer: AnyTokenizer
    completion: Preparer
    chat: Preparer
    limits: Limits
    admission: Admission
    router: Router
    metrics: RequestMetrics
    stats: Callable[[], SchedulerStats]
    # Tokenizing a long prompt must not hold up the streams of others, nor a grammar their prompts.
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _compiling: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def card(self) -> ModelCard:
        """That of the name which answers have."""
        return self.cards[0]

    def card_of(self, name: str | None) -> ModelCard:
        """The card of a name, the first for None. Raises ApiError 404 for another model."""
        for card in self.cards:
            if name in (None, card.id):
                return card
        there = " or ".join(repr(card.id) for card in self.cards)
        message = f"the model {name!r} is not here; there is {there}"
        raise ApiError(404, "not_found_error", message, param="model")

    async def prepare(self, preparer: Preparer, given: PromptInput) -> PreparedRequest:
        """Tokenize and check one prompt, if there is room for it at all.

        Raises:
            ApiError: 400 that names field, value and limit; 503 if the server is full.
        """
        self.admission.check(1)

        def work() -> PreparedRequest:
            prepared = preparer.prepare(given)
            check_request(prepared.to_add("new"), self.limits)
            return prepared

        pool = self._compiling if asks_structure(given.sampling) else self._tokenizing
        return await self.offload(work, pool)

    async def offload(self, work: Callable[[], T], pool: ThreadPoolExecutor | None = None) -> T:
        """Run ``work`` beside the streams; its ValueError is the client's mistake."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool or self._tokenizing, work)
        except ValueError as error:
            raise refused_value(str(error), NAMED) from None

    @contextmanager
    def serve(
        self, prefix: str, requests: Sequence[PreparedRequest], name: str | None
    ) -> Iterator[Generation]:
        """Admit a call and run it; leaving the context early aborts what is left of it.

        Raises:
            ApiError: 503 if the server is full or ends. One that waits for too long fails.
        """
        answer_id = f"{prefix}-{secrets.token_hex(16)}"
        lengths = [len(request.prompt_ids) for request in requests]
        with self.admission.admit(lengths) as admitted:
            generation = Generation(answer_id, requests, self.tokenizer, admitted.begin, name=name)
            with admitted.deadline(generation.fail), self.router.serve(generation):
                yield generation


def create_service(front: FrontEnd, inbox: Inbox, admission: Admission) -> Service:
    """For an engine that can serve; requests go to it through ``inbox``."""
    resolved, engine = front.resolved, front.engine
    worker = resolved.worker
    metrics = RequestMetrics()
    num_blocks = min(rank.num_blocks for rank in engine.summary().ready)

    def preparer(**defaults: Any) -> Preparer:
        return front.preparer(overrides=defaults, raw=True)

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=int(time.time()),
            root=resolved.launch.model,
            max_model_len=worker.schedule.max_model_len,
        )

    return Service(
        cards=[card(name) for name in resolved.launch.model_names],
        tokenizer=front.tokenizer,
        completion=preparer(max_tokens=COMPLETION_MAX_TOKENS),
        chat=preparer(max_tokens=None),
        limits=Limits(
            worker.model.vocab_size,
            worker.schedule.max_model_len,
            worker.cache.block_size,
            num_blocks - 1,
        ),
        admission=admission,
        router=Router(inbox, metrics),
        metrics=metrics,
        stats=engine.stats,
    )
