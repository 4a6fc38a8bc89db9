"""Every struct that crosses a process boundary, with its producer and its consumer.

Token ids and block ids travel as packed little-endian int32 bytes (see ``pack_ids``): packing
4,096 ids costs a tenth of a list. Structs are tagged, so one decoder reads a whole channel.
"""

import sys
from array import array
from collections.abc import Iterable

import msgspec

from lockstep.comm.sampling import SamplingParams

WIRE_VERSION = 1
PADDING_BLOCK = 0
ID_BYTES = 4


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack ids into int32 bytes, little-endian."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of ``pack_ids``."""
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


# Producer: front end. Consumer: Scheduler.
class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """One generation to run.

    ``stop_ids`` are the ids that end it on the device: the model's end tokens unless
    ``ignore_eos``, and ``sampling.stop_token_ids``.
    """

    req_id: str
    prompt_ids: bytes
    sampling: SamplingParams
    stop_ids: bytes = b""
    cache_salt: str = ""


# Producer: front end. Consumer: Scheduler.
class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    req_id: str


# Producer: a rank's sampler, inside StepResult. Consumer: Scheduler, then front end.
class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one sampled token and of the best ``top_ids`` beside it, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


# Producer: Scheduler. Consumer: front end.
class TokenDelta(msgspec.Struct, frozen=True, tag="delta", gc=False):
    """New tokens of a request; ``finish_reason`` (stop, length, abort, error) with the last.

    ``engine_ended``: the error is not about the request, which may be tried on another engine.
    ``dp_rank``: the replica it was placed on; -1 where that is not known.
    ``bad_request``: the error is about what the request asks for, and begins with the field.
    """

    req_id: str
    token_ids: bytes = b""
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    engine_ended: bool = False
    dp_rank: int = -1
    bad_request: bool = False


def lost_request(req_id: str, error: str) -> TokenDelta:
    """The last delta of a request whose engine ends."""
    return TokenDelta(req_id, finish_reason="error", error=error, engine_ended=True)


# Producer: Scheduler, inside ReplicaPlan. Consumer: Worker.
class JoinLane(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a lane. Prompt ids follow in Chunks, from ``num_computed_tokens`` on.

    ``num_output_tokens`` is above 0 after a preemption: outputs are then recomputed as part of the
    prompt, and positions of the sampling noise go on from there. ``seed`` is never None here.
    """

    lane: int
    req_id: str
    seed: int
    sampling: SamplingParams
    stop_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    block_ids: bytes


# Producer: Scheduler, inside ReplicaPlan. Consumer: Worker.
class LaneBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to a lane's block table."""

    lane: int
    block_ids: bytes


# Producer: Scheduler, inside ReplicaPlan. Consumer: Worker.
class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Prompt ids a lane computes in this step; ``samples`` if it is the last chunk."""

    lane: int
    token_ids: bytes
    samples: bool


# Producer: Scheduler, inside ReplicaPlan. Consumer: Worker.
class LaneMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a lane may sample in this step, because of its grammar.

    Bit ``i % 32`` of the little-endian int32 word ``i // 32`` is that of id ``i``; there is a word
    for every 32 ids of the whole vocabulary, whatever shard a rank holds.
    """

    lane: int
    words: bytes


# Producer: Scheduler, inside StepPlan. Consumer: the ranks of one replica.
class ReplicaPlan(msgspec.Struct, frozen=True, array_like=True):
    """What changes on one replica before the step, and what its lanes compute.

    Applied in this order: ``leaves`` (lanes whose request ended or was preempted; their rows
    become dummies), ``moves`` (src, dst) that compact the lanes, ``joins``, ``new_blocks``. Lane
    numbers of joins, new_blocks, chunks and idle_lanes are those after the moves. Then lanes
    0..num_lanes-1 each decode one token, except lanes with a chunk, which compute it, and idle
    lanes, which compute nothing. With num_lanes 0 the replica runs a dummy step on block 0. Lanes
    with a mask sample among the tokens it allows; there are masks only in plans of one step.
    """

    num_lanes: int
    leaves: list[int] = []
    moves: list[tuple[int, int]] = []
    joins: list[JoinLane] = []
    new_blocks: list[LaneBlocks] = []
    chunks: list[Chunk] = []
    idle_lanes: list[int] = []
    masks: list[LaneMask] = []


# Producer: parallel.agreement. Consumer: Scheduler and, inside StepPlan, Worker.
class StepAgreement(msgspec.Struct, frozen=True, array_like=True):
    """What a lockstep group fixes before a step.

    ``run_mode`` is a ``worker.graphs.mode.RunMode``. ``num_tokens_padded`` is None in EAGER, where
    each replica keeps its own count. ``uniform_query_len`` is 0 unless every replica decodes.
    """

    run_mode: int
    num_tokens_padded: int | None
    num_tokens_across_dp: list[int]
    uniform_query_len: int


# Producer: Scheduler. Consumer: all ranks of a lockstep group, through their plan ring.
class StepPlan(msgspec.Struct, frozen=True, tag="plan"):
    """Steps ``step_id`` .. ``step_id + num_steps - 1`` of a lockstep group, all with one agreement.

    ``num_steps`` above 1 only for steady decode; changes apply before the first of them.
    ``replicas`` is in order of dp_rank within the group. With ``capture`` nothing runs and no lane
    changes: the plan orders the graph at that place of the manifest, between two steps.
    """

    epoch: int
    step_id: int
    agreement: StepAgreement
    replicas: list[ReplicaPlan]
    num_steps: int = 1
    capture: int | None = None


# Producer: Scheduler. Consumer: all ranks of a lockstep group, through their plan ring.
class StopWorkers(msgspec.Struct, frozen=True, tag="stop"):
    epoch: int
    reason: str = ""


# Producer: a rank, inside WorkerReady and StepResult. Consumer: launcher.
class GraphCost(msgspec.Struct, frozen=True, array_like=True):
    """What capturing one descriptor took; 0 bytes where nobody counts.

    ``uniform_query_len`` is 0 for mixed batches; ``num_graphs`` are its parts, each a graph.
    """

    num_tokens: int
    uniform_query_len: int
    seconds: float
    num_bytes: int
    num_graphs: int


# Producer: tp_rank 0 of a replica (every rank under --verify-agreement). Consumer: Scheduler.
class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """What one step gave.

    ``counts`` and ``token_ids`` are packed int32, one per lane of that step's lane table: count 1
    with a token, or 0 (idle, mid-prompt, or already ended on the device). ``bad_lanes`` had
    non-finite logits; their request must end with an error. ``logprobs`` pairs lanes with theirs.
    ``launch_s`` is what the rank's host took to launch it. ``captured`` is what a plan that ordered
    a graph cost.
    """

    epoch: int
    step_id: int
    dp_rank: int
    tp_rank: int
    counts: bytes
    token_ids: bytes
    bad_lanes: list[int] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    run_mode: int = 0
    launch_s: float = 0.0
    captured: GraphCost | None = None


# Producer: a rank, inside WorkerReady. Consumer: launcher.
class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's device by what holds them; see ``worker.memory_account``.

    ``parts`` add up to what the device says is in use, of ``total`` (0 where nobody counts).
    ``budget`` is what ``gpu_memory_utilization`` allows, 0 where the KV cache's size was given.
    ``graph_reserve`` is the part of it left free for graphs captured while serving.
    ``estimate_error`` is what was estimated for all but the KV cache less what that then took,
    None where nothing was estimated.
    """

    parts: dict[str, int]
    total: int = 0
    budget: int = 0
    graph_reserve: int = 0
    estimate_error: int | None = None


# Producer: a rank that measured its all-reduces. Consumer: all ranks, to choose; launcher, to tell.
class SumTimes(msgspec.Struct, frozen=True, array_like=True):
    """Microseconds of a sum over ranks and the norm behind it, by algorithm, at one size."""

    num_bytes: int
    microseconds: dict[str, float]


# Producer: a rank, once it can serve. Consumer: launcher.
class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """``num_blocks`` includes block 0 and is already the least of the lockstep group.

    ``graph_costs`` are in the order of capture, ``num_graphs`` their graphs; ``num_late_graphs``
    more sizes are captured while serving. ``all_reduce`` is the table by which the ranks of a
    replica sum, ``sum_times`` what it was chosen by.
    """

    global_rank: int
    pid: int
    host: str
    device: str
    num_blocks: int
    graph_mode: str
    num_graphs: int
    stage_seconds: dict[str, float]
    memory: MemoryReport
    graph_costs: list[GraphCost] = []
    num_late_graphs: int = 0
    all_reduce: str = ""
    sum_times: list[SumTimes] = []


# Producer: a rank that was told to note them. Consumer: launcher.
class DeviceTimes(msgspec.Struct, frozen=True):
    """When the last of ``num_steps`` steps began and ended on a rank's device, in nanoseconds.

    The clock is the device's own: times of several devices cannot be compared.
    """

    num_steps: int
    begin_ns: list[int]
    end_ns: list[int]


# Producer: a rank that is about to exit with an error. Consumer: Scheduler, then launcher.
class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    global_rank: int
    step_id: int
    error: str
    traceback: str


PlanMessage = StepPlan | StopWorkers
ResultMessage = StepResult | WorkerFailed
FrontEndMessage = AddRequest | AbortRequest
