"""Read the result of a step through the lane table of that step."""

from collections.abc import Callable
from struct import Struct

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import StepResult, TokenDelta, unpack_ids
from lockstep.worker.request import Request
from lockstep.worker.schedule.replica import Replica, StepLanes

_ONE_ID = Struct("4s")

# Ends a request for a reason.
Finish = Callable[[Request, str], None]


def read_result(
    replica: Replica, lanes: StepLanes, result: StepResult, *, vocab_size: int, finish: Finish
) -> list[TokenDelta]:
    """Append the tokens of a step to their requests and say what is new.

    Tokens of requests that ended before are surplus of the run-ahead, and dropped.

    Raises:
        RankMismatch: the result does not have the lanes that were planned, or a lane that had to
            sample gave nothing.
    """
    counts, tokens = unpack_ids(result.counts), unpack_ids(result.token_ids)
    if not len(counts) == len(tokens) == len(lanes.requests):
        raise RankMismatch(
            f"{_name(result)} gave {len(counts)} counts and {len(tokens)} tokens, "
            f"planned were {len(lanes.requests)} lanes"
        )
    deltas = _fail_bad_lanes(replica, lanes, result, counts, tokens, vocab_size, finish)
    for piece in lanes.pieces:
        replica.publish(piece.request, piece.end)
        replica.waiting.try_again()
    logprobs = {lane: [chosen] for lane, chosen in result.logprobs}
    table = zip(lanes.requests, counts, tokens, _ONE_ID.iter_unpack(result.token_ids), strict=True)
    for lane, (request, count, token, (token_id,)) in enumerate(table):
        if request.finish_reason is not None:
            continue
        if not count:
            _check_silent(lane, lanes, result)
            continue
        packed_ids = request.packed_ids
        packed_ids += token_id
        reason = None
        if len(packed_ids) >= request.check_at or token in request.stop_set:
            reason = _look(replica, request, token, finish)
        chosen = logprobs.get(lane) if logprobs else None
        cached = request.num_cached_tokens
        deltas.append(TokenDelta(request.req_id, token_id, reason, None, chosen, cached))
    return deltas


def _fail_bad_lanes(
    replica: Replica,
    lanes: StepLanes,
    result: StepResult,
    counts: list[int],
    tokens: list[int],
    vocab_size: int,
    finish: Finish,
) -> list[TokenDelta]:
    bad = {lane: "the logits are not finite" for lane in result.bad_lanes}
    if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
        for lane, token in enumerate(tokens):
            if counts[lane] and not 0 <= token < vocab_size:
                bad[lane] = f"sampled token id {token} is not in [0, {vocab_size})"
    deltas = list[TokenDelta]()
    for lane, error in sorted(bad.items()):
        request = lanes.requests[lane]
        if request.finish_reason is not None:
            continue
        # Its KV may hold what made the logits bad: nobody else shall find it.
        replica.pool.forget(request.block_ids)
        finish(request, "error")
        text = f"output token {request.num_outputs}: {error}"
        cached = request.num_cached_tokens
        deltas.append(TokenDelta(request.req_id, b"", "error", text, None, cached))
    return deltas


def _look(replica: Replica, request: Request, token: int, finish: Finish) -> str | None:
    """Publish blocks that are full and end the request if its last token ends it."""
    num_computed = request.num_tokens - 1
    replica.publish(request, num_computed)
    if token in request.stop_set:
        reason = "stop"
    elif num_computed >= request.max_positions:
        reason = "length"
    else:
        return None
    finish(request, reason)
    return reason


def _check_silent(lane: int, lanes: StepLanes, result: StepResult) -> None:
    if lane not in lanes.silent:
        raise RankMismatch(
            f"{_name(result)} sampled nothing in lane {lane} "
            f"(request {lanes.requests[lane].req_id}), which had to"
        )


def _name(result: StepResult) -> str:
    return f"dp_rank {result.dp_rank} tp_rank {result.tp_rank} step {result.step_id}"
