"""Read the result of a step through the lane table of that step."""

from collections.abc import Callable

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import ID_BYTES, StepResult, TokenDelta, unpack_ids
from lockstep.worker.request import Request
from lockstep.worker.schedule.replica import Replica, StepLanes

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
    logprobs = dict(result.logprobs)
    packed = result.token_ids
    for lane, request in enumerate(lanes.requests):
        if request.finish_reason is not None:
            continue
        if not counts[lane]:
            _check_silent(lane, lanes, result)
            continue
        reason = _append(replica, request, tokens[lane], finish)
        token = packed[lane * ID_BYTES : (lane + 1) * ID_BYTES]
        chosen = [logprobs[lane]] if lane in logprobs else None
        deltas.append(
            TokenDelta(request.req_id, token, reason, None, chosen, request.num_cached_tokens)
        )
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


def _append(replica: Replica, request: Request, token: int, finish: Finish) -> str | None:
    token_ids = request.token_ids
    token_ids.append(token)
    num_computed = len(token_ids) - 1
    if num_computed >= request.publish_at:
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
