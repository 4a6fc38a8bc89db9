"""Read the result of a step through the lane table of that step."""

from collections.abc import Callable, Iterable
from itertools import repeat
from struct import Struct

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import ID_BYTES, StepResult, TokenDelta, TokenLogprobs, unpack_ids
from lockstep.worker.grammars.grammar import GrammarError
from lockstep.worker.grammars.matcher import Matcher
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
    if lanes.silent or 0 in counts:
        _check_silent(lanes, counts, result)
    for piece in lanes.pieces:
        replica.publish(piece.request, piece.end)
        replica.waiting.try_again()
    packed = _ONE_ID.iter_unpack(result.token_ids)
    chosen: Iterable[list[TokenLogprobs] | None] = repeat(None)
    if result.logprobs:
        chosen = _by_lane(result)
    # The one loop over all lanes in steady decode: every call in it would show.
    dp_rank = result.dp_rank
    for request, count, token, (token_id,), logprobs in zip(
        lanes.requests, counts, tokens, packed, chosen, strict=False
    ):
        if not count or request.finish_reason is not None:
            continue
        packed_ids = request.packed_ids
        packed_ids += token_id
        reason = error = None
        if len(packed_ids) >= request.check_at or token in request.stop_set:
            reason, error = _look(replica, request, token, finish)
        cached = request.num_cached_tokens
        deltas.append(
            TokenDelta(
                request.req_id,
                token_id,
                reason,
                error,
                logprobs,
                cached,
                False,
                dp_rank,
                # Only a grammar ends a request with an error here.
                error is not None,
            )
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
        deltas.append(
            TokenDelta(request.req_id, b"", "error", text, None, cached, False, result.dp_rank)
        )
    return deltas


def _look(
    replica: Replica, request: Request, token: int, finish: Finish
) -> tuple[str | None, str | None]:
    """Publish blocks that are full and end the request if its last token ends it.

    Returns:
        (reason, error), None if there is none.
    """
    num_computed = request.num_tokens - 1
    replica.publish(request, num_computed)
    reason = error = None
    if token in request.stop_set:
        reason = "stop"
    elif request.matcher is not None:
        reason, error = _follow(request.matcher, token)
    if reason is None and num_computed >= request.max_positions:
        reason = "length"
    if reason is not None:
        finish(request, reason)
    return reason, error


def _follow(matcher: Matcher, token: int) -> tuple[str | None, str | None]:
    """Take a token along a grammar; (reason, error) if the request ends with it."""
    try:
        matcher.take(token)
    except GrammarError as error:
        return "error", f"structured_outputs: {error}"
    return "stop" if matcher.complete else None, None


def _check_silent(lanes: StepLanes, counts: list[int], result: StepResult) -> None:
    for lane, (request, count) in enumerate(zip(lanes.requests, counts, strict=True)):
        if request.finish_reason is None and bool(count) == (lane in lanes.silent):
            what = "a token it had not to sample" if count else "nothing, but had to sample,"
            raise RankMismatch(f"{_name(result)} gave {what} in lane {lane} ({request.req_id})")


def _by_lane(result: StepResult) -> list[list[TokenLogprobs] | None]:
    told = dict(result.logprobs)
    lanes = range(len(result.counts) // ID_BYTES)
    return [[told[lane]] if lane in told else None for lane in lanes]


def _name(result: StepResult) -> str:
    return f"dp_rank {result.dp_rank} tp_rank {result.tp_rank} step {result.step_id}"
