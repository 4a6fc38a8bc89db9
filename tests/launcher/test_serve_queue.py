"""What waits for its turn: how much of it a server takes, and for how long."""

import asyncio
import re
import time
from typing import Any

import pytest
from exposed import Exposed
from fake_engine import FakeEngine, HeldEngine, endless
from inline_engine import InlineEngine, start_inline_engine
from served import Reply, Served, Visit, ask, await_true, gather, serving

from lockstep.comm.messages import TokenDelta
from lockstep.launcher.engine import Progress
from lockstep.launcher.resolve import Resolved
from lockstep.launcher.serve.admission import Admission
from lockstep.launcher.serve.options import ServeOptions

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": 500, "stream": True}


def everything(prompt_ids: list[int]) -> bool:
    return True


def nothing(prompt_ids: list[int]) -> bool:
    return False


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(endless, step_s=0.005)


@pytest.fixture
def served(model: str, engine: FakeEngine) -> Any:
    with serving(model, engine.start, max_num_seqs=2, max_num_queued_reqs=4) as served:
        yield served


def test_fault_97_a_full_server_refuses_at_once_and_says_when_to_come_back(
    served: Served, engine: FakeEngine
) -> None:
    call = {"prompt": "x", "max_tokens": 20}
    replies = served.run(gather(*(ask(served.app, COMPLETIONS, call) for _ in range(50))))
    assert sorted(reply.status for reply in replies) == [200] * 6 + [503] * 44
    refused = next(reply for reply in replies if reply.status == 503)
    assert (
        refused.headers["retry-after"] == "1"
        and "--max-num-queued-reqs" in refused.error()["message"]
    )
    assert len(engine.added) == 6 and served.state.open_service().admission.in_flight == 0
    assert served.ask(COMPLETIONS, call | {"n": 7}).status == 400
    assert served.ask(COMPLETIONS, call | {"n": 6}).status == 200


def test_fault_97_prompts_that_wait_are_bounded_by_their_tokens_too(model: str) -> None:
    engine = HeldEngine(everything)
    options = ServeOptions(max_num_queued_tokens=25)
    call = {"prompt": "x" * 10, "max_tokens": 3}

    async def let_go(admission: Admission) -> None:
        while not admission.num_refused:
            await asyncio.sleep(0.005)
        engine.holds = nothing

    with serving(model, engine.start, options=options) as served:
        admission = served.state.open_service().admission
        calls = [ask(served.app, COMPLETIONS, call) for _ in range(3)]
        *replies, _ = served.run(gather(*calls, let_go(admission)))
        assert sorted(reply.status for reply in replies) == [200, 200, 503]
        refused = next(reply for reply in replies if reply.status == 503)
        assert refused.headers["retry-after"] == "1"
        assert "prompts of 20 tokens wait and at most 25 may" in refused.error()["message"]
        assert admission.waiting_tokens == 0 and len(engine.added) == 2
        alone = served.ask(COMPLETIONS, call | {"prompt": "x" * 60})
        assert alone.status == 200, "nothing waits before it"


def test_a_prompt_waits_until_its_first_token(served: Served) -> None:
    admission, visit = served.state.open_service().admission, Visit()

    async def leave_once_begun() -> tuple[int, int]:
        while not admission.waiting_tokens:
            await asyncio.sleep(0)
        while admission.waiting_tokens and admission.in_flight:
            await asyncio.sleep(0.005)
        seen = (admission.in_flight, admission.waiting_tokens)
        visit.leave.set()
        return seen

    asking = ask(served.app, COMPLETIONS, ENDLESS, visit=visit)
    _, seen = served.run(gather(asking, leave_once_begun()))
    assert seen == (1, 0)


def check_refused(reply: Reply, seconds: float, answers: str) -> None:
    """It names how many answers had not begun, after how long, and the flag."""
    assert reply.status == 503 and reply.headers["retry-after"] == "1"
    found = re.fullmatch(
        rf"{answers} answers had not begun after ([\d.]+) seconds, and may wait {seconds:g} "
        r"\(--max-queue-seconds\)",
        reply.error()["message"],
    )
    assert found is not None and float(found[1]) >= seconds


def test_fault_97_what_has_nothing_in_time_is_503_and_leaves_the_engine(model: str) -> None:
    engine = HeldEngine(everything)
    calls: list[dict[str, Any]] = [{"n": 1}, {"n": 2}, {"stream": True}]
    with serving(model, engine.start, options=ServeOptions(max_queue_seconds=0.2)) as served:
        asked = [ask(served.app, COMPLETIONS, {"prompt": "x"} | call) for call in calls]
        replies = served.run(gather(*asked))
        for reply, answers in zip(replies, ("1 of 1", "2 of 2", "1 of 1"), strict=True):
            check_refused(reply, 0.2, answers)
        await_true(lambda: sorted(engine.aborted) == sorted(add.req_id for add in engine.added))
        admission = served.state.open_service().admission
        assert (admission.in_flight, admission.waiting_tokens) == (0, 0)
        told = Exposed(served.ask("/metrics").body.decode())
    assert told.one("lockstep_admission_rejections_total") == 3
    assert told.by("lockstep_request_success_total", "finished_reason") == {"error": 4}


def test_fault_97_one_answer_that_has_nothing_in_time_ends_its_call(model: str) -> None:
    engine = HeldEngine(lambda prompt_ids: prompt_ids == [2], endless)
    call = ENDLESS | {"prompt": [[1], [2]]}
    with serving(model, engine.start, options=ServeOptions(max_queue_seconds=1)) as served:
        asked = [ask(served.app, COMPLETIONS, call | {"stream": each}) for each in (True, False)]
        streamed, whole = served.run(gather(*asked))
        await_true(lambda: len(engine.aborted) == 4)
    assert streamed.status == 200
    *chunks, last = streamed.events()
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0}
    assert last["error"]["code"] == 503 and "--max-queue-seconds" in last["error"]["message"]
    check_refused(whole, 1, "1 of 2")


class FillingEngine:
    """An inline engine that steps only to fill a free lane of two, until it is no more ``held``."""

    held = True
    most_blocks = 0

    def start(self, resolved: Resolved, progress: Progress) -> InlineEngine:
        engine = start_inline_engine(resolved, progress)
        step = engine.poll

        def poll(timeout_s: float) -> list[TokenDelta]:
            [replica] = engine.stats().replicas
            if self.held and not (replica.num_waiting and replica.num_running < 2):
                time.sleep(0.005)
                return []
            deltas = step(timeout_s)
            self.most_blocks = max(self.most_blocks, blocks_in_use(engine))
            return deltas

        engine.poll = poll  # type: ignore[method-assign]
        return engine


def blocks_in_use(engine: Any) -> int:
    [replica] = engine.stats().replicas
    return replica.num_blocks - replica.num_free_blocks - replica.num_cached_blocks


def test_fault_97_who_ran_goes_on_and_lanes_and_blocks_of_who_waited_are_free(model: str) -> None:
    engine = FillingEngine()
    short = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}
    # Longer than a step, so that one holds blocks without a token, and one waits for its lane.
    long = {"prompt": "b" * 40, "max_tokens": 2, "ignore_eos": True}
    settings = {
        "load_format": "dummy", "kv_cache_memory_bytes": 40_000, "cudagraph_mode": "NONE",
        "max_num_seqs": 2, "max_num_batched_tokens": 16,
    }  # fmt: skip

    async def scene(served: Served) -> tuple[Reply, list[Reply]]:
        admission = served.state.open_service().admission
        running = asyncio.create_task(ask(served.app, COMPLETIONS, short))
        while not admission.in_flight or admission.waiting_tokens:
            await asyncio.sleep(0.005)
        late = await gather(*(ask(served.app, COMPLETIONS, long) for _ in range(2)))
        assert admission.in_flight == 1
        engine.held = False
        return await running, late

    options = ServeOptions(max_queue_seconds=1)
    with serving(model, engine.start, options=options, **settings) as served:
        ran, late = served.run(scene(served))
        assert ran.json()["usage"]["completion_tokens"] == 30
        for reply in late:
            check_refused(reply, 1, "1 of 1")
        assert engine.most_blocks > 1
        await_true(lambda: blocks_in_use(served.engine) == 0)
        assert served.engine.stats().num_finished == {"abort": 2, "length": 1}
        both = served.run(gather(*(ask(served.app, COMPLETIONS, long) for _ in range(2))))
        assert [reply.status for reply in both] == [200, 200]
