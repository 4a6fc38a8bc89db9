"""Short answers about the server itself. None of them touches the engine's step."""

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response

from lockstep.launcher.metrics.exposition import CONTENT_TYPE, ServerFacts, render
from lockstep.launcher.serve.body import json_response
from lockstep.launcher.serve.life import State
from lockstep.launcher.serve.service import Service
from lockstep.launcher.serve.state import ServerState, state_of
from lockstep.launcher.version import package_version
from lockstep.worker.schedule.stats import SchedulerStats

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 5.0


async def health(request: Request) -> Response:
    """Alive: 200 with nothing in it, also while loading and draining; 503 once the engine died."""
    return Response(status_code=503 if state_of(request).life.state is State.DEAD else 200)


async def ready(request: Request) -> Response:
    """Takes new work: 200, else 503; with state, stage of the start, and reason."""
    life = state_of(request).life
    return json_response(life.report(), 200 if life.state is State.READY else 503)


async def show_version(request: Request) -> Response:
    return json_response({"version": package_version()})


async def load(request: Request) -> Response:
    """Generations in the server, and how many it takes."""
    service = state_of(request).service
    if service is None:
        return json_response({"server_load": 0, "server_limit": 0})
    admission = service.admission
    return json_response({"server_load": admission.in_flight, "server_limit": admission.limit})


async def metrics(request: Request) -> Response:
    """Prometheus' text format; empty while loading."""
    state = state_of(request)
    text = b""
    if state.service is not None:
        stats = await _stats(state.service)
        facts, counts = _facts(state, state.service), state.service.metrics
        compat = state.options.metrics_compat
        text = await asyncio.to_thread(render, facts, counts, stats, compat)
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _facts(state: ServerState, service: Service) -> ServerFacts:
    return ServerFacts(
        model_name=service.card.id,
        block_size=service.limits.block_size,
        num_blocks=service.limits.num_blocks,
        num_rejected=service.admission.num_refused,
        longest_gc_pause_s=(state.heap.longest_pause_s, state.heap.longest_pause_cpu_s),
    )


async def _stats(service: Service) -> SchedulerStats | None:
    """None if the scheduler does not answer: a scraper must see the rest then."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(service.stats), _STATS_TIMEOUT_S)
    except Exception as error:
        logger.warning("no statistics of the scheduler: %r", error)
        return None
