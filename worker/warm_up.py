"""The heaviest steps a rank can be asked for, run before capture so that nothing comes first later.

They load kernels, fill the allocator's caches and make every communicator connect. All lanes live
on the padding block, and whatever they sample is thrown away.
"""

from collections.abc import Iterator

from lockstep.comm.messages import (
    Chunk,
    JoinLane,
    LaneMask,
    ReplicaPlan,
    StepAgreement,
    StepPlan,
    pack_ids,
)
from lockstep.comm.sampling import MAX_LOGPROBS, SamplingParams
from lockstep.worker.config import ScheduleConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.masks import words_per_mask

# One per sampling variant: greedy, noise alone, every filter and penalty, log-probabilities.
SAMPLING_OPTIONS = (
    SamplingParams(temperature=0.0, max_tokens=None),
    SamplingParams(temperature=1.0, max_tokens=None),
    SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        min_tokens=1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        max_tokens=None,
    ),
    SamplingParams(temperature=1.0, logprobs=MAX_LOGPROBS, max_tokens=None),
)


def warm_up_plans(
    schedule: ScheduleConfig, vocab_size: int, num_tokens: int, num_replicas: int
) -> list[StepPlan]:
    """Eager plans for all replicas alike: prompts wide and long, then masked decode, per option.

    After these come smaller and smaller ones: libraries choose kernels by size, and load the
    chosen one when it is first used. Rounded up, halves leave out no range between two powers of
    two, by which our kernels choose.

    Args:
        num_tokens: tokens of a prompt step, at most ``max_num_batched_tokens``.
    """
    plans: list[StepPlan] = []
    anything, num_lanes = pack_ids([-1] * words_per_mask(vocab_size)), 0
    for lens, sampling in _batches(schedule, num_tokens):
        leaves, num_lanes = list(range(num_lanes)), len(lens)
        joins = [_join(lane, length, sampling) for lane, length in enumerate(lens)]
        chunks = [Chunk(lane, pack_ids([0] * length), True) for lane, length in enumerate(lens)]
        prompts = ReplicaPlan(num_lanes, leaves=leaves, joins=joins, chunks=chunks)
        plans.append(_eager(prompts, sum(lens), 0, num_replicas))
        masks = [LaneMask(lane, anything) for lane in range(num_lanes)]
        plans.append(_eager(ReplicaPlan(num_lanes, masks=masks), num_lanes, 1, num_replicas))
    leaving = ReplicaPlan(0, leaves=list(range(num_lanes)))
    return [*plans, _eager(leaving, 0, 1, num_replicas)]


def _batches(
    schedule: ScheduleConfig, num_tokens: int
) -> Iterator[tuple[list[int], SamplingParams]]:
    """(length of each lane's prompt, how it samples)."""
    longest = max(1, schedule.max_model_len - 1)
    most_lanes = min(schedule.max_num_seqs, num_tokens)
    wide = _spread(num_tokens, most_lanes, longest)
    long = _spread(num_tokens, min(most_lanes, -(-num_tokens // longest)), longest)
    for lens in (wide, long) if wide != long else (wide,):
        for sampling in SAMPLING_OPTIONS:
            yield lens, sampling
    while num_tokens > 1:
        num_tokens = -(-num_tokens // 2)
        yield _spread(num_tokens, min(most_lanes, num_tokens), longest), SAMPLING_OPTIONS[0]


def _spread(num_tokens: int, num_lanes: int, longest: int) -> list[int]:
    each, more = divmod(num_tokens, num_lanes)
    return [min(longest, each + (lane < more)) for lane in range(num_lanes)]


def _join(lane: int, num_prompt_tokens: int, sampling: SamplingParams) -> JoinLane:
    return JoinLane(
        lane=lane,
        req_id=f"warm-up {lane}",
        seed=lane,
        sampling=sampling,
        stop_ids=pack_ids([0]),
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=0,
        num_output_tokens=0,
        block_ids=b"",
    )


def _eager(
    replica: ReplicaPlan, num_tokens: int, uniform_query_len: int, num_replicas: int
) -> StepPlan:
    counts = [num_tokens] * num_replicas
    agreement = StepAgreement(RunMode.EAGER, None, counts, uniform_query_len)
    return StepPlan(0, 0, agreement, [replica] * num_replicas)
