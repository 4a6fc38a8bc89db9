"""The end of a step in one kernel: choose, check stops, store the row, move lanes on. CUDA, Triton.

The torch form of all this is ``Step.tail`` with ``Sampler.advance``; tests compare the two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.sample import best_of
from lockstep.worker.output_ring import NOT_FINITE, OUT_OF_STEP, PEER_SHIFT, SLOT_FAULT
from lockstep.worker.sampling_state import MAX_LANE_STOP_IDS, LaneSampling
from lockstep.worker.state import StepState

_STOPS = triton.next_power_of_2(MAX_LANE_STOP_IDS)


@triton.jit
def _choose(score_ptr, id_ptr, row_start, step, NUM: tl.constexpr, PADDED: tl.constexpr):
    places = tl.arange(0, PADDED)
    at = score_ptr + row_start + places * step
    scores = tl.load(at, mask=places < NUM, other=float("-inf"))
    best, place = best_of(tl.where(scores == scores, scores, float("inf")))
    token = tl.load(id_ptr + row_start + place * step).to(tl.int64)
    finite = (best < float("inf")) & (best > float("-inf"))
    return tl.where(finite, token, 0), finite


@triton.jit
def _is_stop(stop_ids_ptr, row, token, ROW: tl.constexpr, NUM: tl.constexpr, PADDED: tl.constexpr):
    places = tl.arange(0, PADDED)
    stops = tl.load(stop_ids_ptr + row * ROW + places, mask=places < NUM, other=-1)
    return tl.max((stops == token).to(tl.int32), 0) > 0


@triton.jit
def _peer_status(
    peer_steps_ptr, MY_PEER: tl.constexpr, NUM_PEERS: tl.constexpr, PADDED_PEERS: tl.constexpr,
    OUT_OF_STEP: tl.constexpr, PEER_SHIFT: tl.constexpr,
):  # fmt: skip
    peers = tl.arange(0, PADDED_PEERS)
    mine = tl.load(peer_steps_ptr + MY_PEER)
    steps = tl.load(peer_steps_ptr + peers, mask=peers < NUM_PEERS, other=0.0)
    differs = ((steps != mine) & (peers < NUM_PEERS)).to(tl.int32)
    found, first = tl.max(differs, 0, return_indices=True, return_indices_tie_break_left=True)
    return found * (OUT_OF_STEP + (first << PEER_SHIFT))


# Strides and alignment of gathered candidates follow the batch: no batch may mean a compilation.
@triton.jit(
    do_not_specialize=["vocab_start", "candidates_row", "candidates_step"],
    do_not_specialize_on_alignment=["score_ptr", "id_ptr"],
)
def _finish_kernel(
    token_ptr, finite_ptr, score_ptr, id_ptr,
    active_ptr, samples_ptr, query_lens_ptr, num_computed_ptr, last_token_ptr, faults_ptr,
    ring_ptr, counter_ptr, peer_steps_ptr, position_ptr, min_tokens_ptr, stop_ids_ptr, history_ptr,
    vocab_start, candidates_row, candidates_step, DEPTH: tl.constexpr, MAX_LANES: tl.constexpr,
    VOCAB_LOCAL: tl.constexpr, INTS_ROW: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr, PADDED_CANDIDATES: tl.constexpr, NUM_STOPS: tl.constexpr,
    PADDED_STOPS: tl.constexpr, COUNTS_TOKENS: tl.constexpr, MY_PEER: tl.constexpr,
    NUM_PEERS: tl.constexpr, PADDED_PEERS: tl.constexpr, NOT_FINITE: tl.constexpr,
    SLOT_FAULT: tl.constexpr, OUT_OF_STEP: tl.constexpr, PEER_SHIFT: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    active = tl.load(active_ptr + lane) != 0
    emits = active & (tl.load(samples_ptr + lane) != 0)
    token, finite = _choose(
        score_ptr,
        id_ptr,
        lane * candidates_row,
        candidates_step,
        NUM_CANDIDATES,
        PADDED_CANDIDATES,
    )
    counts = emits & finite
    token = tl.where(counts, token, 0)
    tl.store(token_ptr + lane, token)
    tl.store(finite_ptr + lane, (finite | (emits == 0)).to(tl.uint8))

    status = (emits & (finite == 0)).to(tl.int32) * NOT_FINITE
    status += tl.load(faults_ptr + lane) * SLOT_FAULT
    if NUM_PEERS > 1:
        status += _peer_status(
            peer_steps_ptr, MY_PEER, NUM_PEERS, PADDED_PEERS, OUT_OF_STEP, PEER_SHIFT
        )
    out = ring_ptr + (tl.load(counter_ptr) % DEPTH) * (3 * MAX_LANES) + lane
    tl.store(out, counts.to(tl.int32))
    tl.store(out + MAX_LANES, token.to(tl.int32))
    tl.store(out + 2 * MAX_LANES, status)

    position = tl.load(position_ptr + lane * INTS_ROW)
    stop = _is_stop(stop_ids_ptr, lane, token, INTS_ROW, NUM_STOPS, PADDED_STOPS)
    stop = stop & (position >= tl.load(min_tokens_ptr + lane * INTS_ROW))
    ended = emits & (stop | (finite == 0))
    tl.store(position_ptr + lane * INTS_ROW, position + counts.to(tl.int64))
    tl.store(last_token_ptr + lane, token, mask=counts)
    computed = tl.load(query_lens_ptr + lane)
    tl.store(num_computed_ptr + lane, tl.load(num_computed_ptr + lane) + computed, mask=active)
    tl.store(active_ptr + lane, (active & (ended == 0)).to(tl.uint8))
    if COUNTS_TOKENS:
        local = token - vocab_start
        held = counts & (local >= 0) & (local < VOCAB_LOCAL)
        cell = history_ptr + lane * VOCAB_LOCAL + local
        tl.store(cell, tl.load(cell, mask=held, other=0) + 2, mask=held)


def finish(
    state: StepState, lanes: LaneSampling, scores: Tensor, ids: Tensor, *, counts_tokens: bool,
    my_peer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Store a step's row and advance its lanes; the ring's counter stays for the caller to move.

    Args:
        scores, ids: [num_lanes, n] as ``Sampler.candidates`` gives them, of equal strides.
        counts_tokens: whether lanes keep a history of tokens.
        my_peer: place of this rank in ``state.peer_steps``.

    Returns:
        token_ids [num_lanes] int64, 0 where nothing was sampled, and finite [num_lanes] bool.
    """
    num_lanes, num_candidates = scores.shape
    token_ids = torch.empty(num_lanes, dtype=torch.int64, device=scores.device)
    finite = torch.empty(num_lanes, dtype=torch.bool, device=scores.device)
    ring, num_peers = state.output, len(state.peer_steps)
    _finish_kernel[(num_lanes,)](
        token_ids, finite.view(torch.uint8), scores, ids,
        state.active.view(torch.uint8), state.samples.view(torch.uint8), state.query_lens,
        state.num_computed, state.last_token, state.faults, ring.rows, ring.counter,
        state.peer_steps, lanes.position, lanes.min_tokens, lanes.stop_ids, lanes.history,
        lanes.vocab_start, scores.stride(0), scores.stride(1),
        DEPTH=ring.depth, MAX_LANES=state.max_lanes,
        VOCAB_LOCAL=lanes.vocab_local, INTS_ROW=lanes.position.stride(0),
        NUM_CANDIDATES=num_candidates, PADDED_CANDIDATES=triton.next_power_of_2(num_candidates),
        NUM_STOPS=MAX_LANE_STOP_IDS, PADDED_STOPS=_STOPS, COUNTS_TOKENS=counts_tokens,
        MY_PEER=my_peer, NUM_PEERS=num_peers, PADDED_PEERS=triton.next_power_of_2(num_peers),
        NOT_FINITE=NOT_FINITE, SLOT_FAULT=SLOT_FAULT, OUT_OF_STEP=OUT_OF_STEP,
        PEER_SHIFT=PEER_SHIFT, num_warps=1,
    )  # fmt: skip
    return token_ids, finite
