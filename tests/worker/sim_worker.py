"""A worker without a model: applies plans literally, and its tokens are a function of the KV.

A token depends on everything the lane can read through its block table, so a block that is shared
wrongly, reused too early or not written shows in the output. Ownership is checked at every write.
"""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

from lockstep.comm.messages import (
    PADDING_BLOCK,
    AddRequest,
    GraphCost,
    ReplicaPlan,
    StepPlan,
    StepResult,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from lockstep.comm.sampling import SamplingParams
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import CacheConfig, GraphConfig, ModelConfig, ScheduleConfig
from lockstep.worker.schedule.scheduler import Scheduler

VOCAB = 97


def next_token(history: list[int], seed: int, position: int) -> int:
    """The sampled token after ``history``: noise depends on seed and output position alone."""
    text = f"{history}/{seed}/{position}".encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % VOCAB


def expected_outputs(add: AddRequest, max_outputs: int) -> list[int]:
    """What a request must give, whatever shares its batch."""
    history, stops, outputs = unpack_ids(add.prompt_ids), set(unpack_ids(add.stop_ids)), list[int]()
    while len(outputs) < max_outputs:
        outputs.append(next_token(history + outputs, add.sampling.seed or 0, len(outputs)))
        if outputs[-1] in stops:
            break
    return outputs


@dataclass
class SimLane:
    req_id: str
    seed: int
    stop_ids: set[int]
    blocks: list[int]
    position: int
    num_outputs: int
    needs_all: bool
    last_token: int | None = None
    ended: bool = False


@dataclass
class SimReplica:
    """One replica; ``kv`` maps (block, offset) to the token that was computed there."""

    block_size: int
    num_blocks: int
    dp_rank: int = 0
    lanes: list[SimLane | None] = field(default_factory=list)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    bad_requests: set[str] = field(default_factory=set)
    num_steps: int = 0
    captured: list[int] = field(default_factory=list)

    def execute(self, plan: StepPlan, index: int) -> StepResult:
        replica = plan.replicas[index]
        if plan.capture is not None:
            assert replica == ReplicaPlan(0), "a capture changes no lane"
            self.captured.append(plan.capture)
            return StepResult(
                plan.epoch, plan.step_id, self.dp_rank, 0, b"", b"",
                captured=GraphCost(plan.capture, 1, 0.5, 100, 4),
            )  # fmt: skip
        self._apply(replica)
        self._check_ownership(replica)
        chunks = {chunk.lane: chunk for chunk in replica.chunks}
        counts, tokens, bad = [], [], []
        for number in range(replica.num_lanes):
            lane, token = self.lanes[number], None
            assert lane is not None
            if number in chunks:
                token = self._chunk(lane, unpack_ids(chunks[number].token_ids))
                token = token if chunks[number].samples else None
            elif number not in replica.idle_lanes and not lane.ended:
                token = self._decode(lane)
            if token is not None and lane.req_id in self.bad_requests:
                bad.append(number)
                lane.ended, token = True, None
            self._store(lane, token, counts, tokens)
        self.num_steps += 1
        return StepResult(
            plan.epoch, plan.step_id, self.dp_rank, 0, pack_ids(counts), pack_ids(tokens), bad,
            run_mode=plan.agreement.run_mode,
        )  # fmt: skip

    def _apply(self, plan: ReplicaPlan) -> None:
        for number in plan.leaves:
            assert self.lanes[number] is not None, f"lane {number} leaves twice"
            self.lanes[number] = None
        for source, target in plan.moves:
            assert self.lanes[source] is not None and self.lanes[target] is None
            self.lanes[target], self.lanes[source] = self.lanes[source], None
        for join in plan.joins:
            self.lanes += [None] * (join.lane + 1 - len(self.lanes))
            assert self.lanes[join.lane] is None, f"lane {join.lane} is taken"
            self.lanes[join.lane] = SimLane(
                join.req_id, join.seed, set(unpack_ids(join.stop_ids)), unpack_ids(join.block_ids),
                join.num_computed_tokens, join.num_output_tokens, join.sampling.needs_history,
            )  # fmt: skip
            assert not (join.sampling.needs_history and join.num_computed_tokens)
        for new in plan.new_blocks:
            lane = self.lanes[new.lane]
            assert lane is not None
            lane.blocks += unpack_ids(new.block_ids)
        taken = [number for number, lane in enumerate(self.lanes) if lane is not None]
        assert taken == list(range(plan.num_lanes)), f"lanes {taken} are not 0..{plan.num_lanes}"
        del self.lanes[plan.num_lanes :]

    def _check_ownership(self, plan: ReplicaPlan) -> None:
        owners = Counter(block for lane in self.lanes if lane for block in lane.blocks)
        assert PADDING_BLOCK not in owners
        assert all(0 < block < self.num_blocks for block in owners)
        for lane in filter(None, self.lanes):
            assert len(set(lane.blocks)) == len(lane.blocks)
            writable = lane.blocks[lane.position // self.block_size :]
            shared = [block for block in writable if owners[block] > 1]
            assert not shared, f"{lane.req_id} could write blocks {shared} of others"

    def _write(self, lane: SimLane, token: int) -> None:
        index, offset = divmod(lane.position, self.block_size)
        assert index < len(lane.blocks), f"{lane.req_id} owns no block for {lane.position}"
        self.kv[lane.blocks[index], offset] = token
        lane.position += 1

    def _read(self, lane: SimLane) -> list[int]:
        places = (divmod(position, self.block_size) for position in range(lane.position))
        return [self.kv[lane.blocks[index], offset] for index, offset in places]

    def _chunk(self, lane: SimLane, token_ids: list[int]) -> int:
        assert token_ids
        for token in token_ids:
            self._write(lane, token)
        return next_token(self._read(lane), lane.seed, lane.num_outputs)

    def _decode(self, lane: SimLane) -> int:
        assert lane.last_token is not None, f"{lane.req_id} decodes before its prompt is done"
        self._write(lane, lane.last_token)
        return next_token(self._read(lane), lane.seed, lane.num_outputs)

    def _store(
        self, lane: SimLane, token: int | None, counts: list[int], tokens: list[int]
    ) -> None:
        counts.append(0 if token is None else 1)
        tokens.append(token or 0)
        if token is None:
            return
        lane.last_token = token
        lane.num_outputs += 1
        lane.ended = token in lane.stop_ids


def make_add(
    req_id: str, prompt: list[int], max_tokens: int | None = 8, stops: tuple[int, ...] = (),
    salt: str = "", **sampling: object,
) -> AddRequest:  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, seed=sampling.pop("seed", 1), **sampling)
    return AddRequest(req_id, pack_ids(prompt), params, pack_ids(stops), salt)


def make_scheduler(
    *, num_blocks: int = 200, block_size: int = 4, dp_size: int = 1, tp_size: int = 1,
    lockstep: str = "auto", verify_agreement: bool = False, caching: bool = True,
    mode: str = "FULL_AND_PIECEWISE", capture: str = "eager", **schedule: object,
) -> Scheduler:  # fmt: skip
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64, "seed": 0}
    model = ModelConfig(
        architecture="sim", vocab_size=VOCAB, hidden_size=1, intermediate_size=1, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=1, max_position_embeddings=64,
    )  # fmt: skip
    return Scheduler(
        model,
        ScheduleConfig(**{**limits, **schedule}),
        CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        ParallelConfig(
            dp_size=dp_size, tp_size=tp_size, dp_lockstep=lockstep,
            verify_agreement=verify_agreement,
        ),
        GraphConfig(mode=mode, capture=capture),
        num_blocks,
    )  # fmt: skip


class Rig:
    """A scheduler over simulated replicas, with plans and results on their way kept apart."""

    def __init__(self, **config: object) -> None:
        self.scheduler = make_scheduler(**config)
        self.group_size = config.get("dp_size", 1) if config.get("lockstep") == "always" else 1
        blocks, size = config.get("num_blocks", 200), config.get("block_size", 4)
        self.replicas = [SimReplica(size, blocks, rank) for rank in range(config.get("dp_size", 1))]
        self.results: list[list[StepResult]] = [[] for _ in self.replicas]
        self.plans: list[StepPlan] = []
        self.deltas: list[TokenDelta] = []
        self.adds: dict[str, AddRequest] = {}

    def add(self, req_id: str, prompt: list[int], max_tokens: int | None = 8, **more) -> None:
        add = make_add(req_id, prompt, max_tokens, **more)
        self.scheduler.add(add)
        self.adds[req_id] = add

    def plan(self, group: int = 0) -> StepPlan | None:
        """Plan a step and execute it at once; the results wait for ``commit``."""
        plan = self.scheduler.plan(group)
        if plan is not None:
            self.plans.append(plan)
            for index in range(self.group_size):
                rank = group * self.group_size + index
                self.results[rank].append(self.replicas[rank].execute(plan, index))
        return plan

    def commit(self, dp_rank: int = 0) -> list[TokenDelta]:
        deltas = self.scheduler.commit(self.results[dp_rank].pop(0))
        self.deltas += deltas
        return deltas

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left to do; run-ahead as deep as it goes."""
        for _ in range(max_steps):
            planned = [self.plan(group) for group in range(self.scheduler.num_groups)]
            waiting = [rank for rank, results in enumerate(self.results) if results]
            if not waiting and not any(planned):
                break
            if not any(planned):
                for rank in waiting:
                    self.commit(rank)
        else:
            raise AssertionError(f"not done after {max_steps} turns")
        self.deltas += self.scheduler.take_deltas()
        self.scheduler.check_conserved()
        assert not self.scheduler.has_work()

    def outputs(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {req_id: [] for req_id in self.adds}
        for delta in self.deltas:
            found[delta.req_id] += unpack_ids(delta.token_ids)
        return found

    def reasons(self) -> dict[str, str]:
        ends = [delta for delta in self.deltas if delta.finish_reason]
        assert len(ends) == len({delta.req_id for delta in ends}), "a request ended twice"
        return {delta.req_id: delta.finish_reason for delta in ends}

    def check_outputs(self, *, of: set[str] | None = None) -> None:
        """Assert that requests (those named, or all) gave exactly what they must give."""
        outputs = self.outputs()
        for req_id in self.adds if of is None else of:
            add = self.adds[req_id]
            assert outputs[req_id] == expected_outputs(add, add.sampling.max_tokens), req_id
