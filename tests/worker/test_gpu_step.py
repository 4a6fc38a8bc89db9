"""Captured steps against eager ones on a GPU, and what a padded step may touch."""

from collections.abc import Iterator

import pytest
import torch
from gpu_rig import BLOCK_SIZE, FULL_POOL, GPU_TINY, MAX_LANES, GpuRig, gpu_config
from rig import chunk, join

from lockstep.comm.messages import ReplicaPlan, unpack_ids
from lockstep.worker.graphs.mode import RunMode

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def rig(request: pytest.FixtureRequest) -> Iterator[GpuRig]:
    made = GpuRig(gpu_config(dtype=request.param))
    yield made
    made.close()


@pytest.fixture
def full_rig(rig: GpuRig) -> Iterator[GpuRig]:
    """All lanes prefilled; emptied afterwards."""
    rig.prefill(MAX_LANES)
    yield rig
    rig.run(ReplicaPlan(0, leaves=list(range(len(rig.lens)))), RunMode.EAGER, None)
    rig.kv.storage[: rig.kv.num_blocks].zero_()


def test_replay_is_eager_bit_for_bit_on_real_lanes_at_every_size(full_rig: GpuRig) -> None:
    rig = full_rig
    assert rig.sizes == [1, 2, 4, 8, 16, 24]
    for size in reversed(rig.sizes):
        rig.keep(max(1, size - 1))
        before = rig.snapshot()
        replayed = [rig.decode(RunMode.FULL, size) for _ in range(3)]
        rig.restore(before)
        called = [rig.decode(RunMode.EAGER, size) for _ in range(3)]
        for (tokens, logits), (wanted, wanted_logits) in zip(replayed, called, strict=True):
            assert torch.equal(logits, wanted_logits), f"size {size}"
            assert tokens == wanted


def test_sizes_replayed_in_the_order_x_y_x(full_rig: GpuRig) -> None:
    rig = full_rig
    rig.keep(3)
    before = rig.snapshot()
    order = [4, 16, 4, 8, 24, 4]
    replayed = [rig.decode(RunMode.FULL, size) for size in order]
    rig.restore(before)
    for (tokens, logits), size in zip(replayed, order, strict=True):
        wanted, wanted_logits = rig.decode(RunMode.EAGER, size)
        assert tokens == wanted and torch.equal(logits, wanted_logits)


def test_a_padded_replay_touches_only_the_scheduled_slots(full_rig: GpuRig) -> None:
    rig = full_rig
    rig.keep(5)
    for size in (8, 16, 24):
        storage, lens = rig.kv.storage[: rig.kv.num_blocks], rig.lens
        before = storage.clone()
        rig.decode(RunMode.FULL, size)
        changed = (storage != before).flatten(4).any(-1).any(1).any(1)
        expected = torch.zeros_like(changed)
        for lane, position in enumerate(lens):
            expected[rig.blocks_of(lane)[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
        assert torch.equal(changed[1:], expected[1:])


def test_tokens_do_not_change_when_every_dead_slot_holds_nan(full_rig: GpuRig) -> None:
    rig = full_rig
    rig.keep(11)
    before = rig.snapshot()
    clean = [rig.decode(RunMode.FULL, 16) for _ in range(4)]
    rig.restore(before)
    for tokens, logits in clean:
        dead = ~rig.live_slots()
        storage = rig.kv.storage[: rig.kv.num_blocks]
        storage.masked_fill_(dead[:, None, None, :, None, None], float("nan"))
        found, found_logits = rig.decode(RunMode.FULL, 16)
        assert found == tokens and torch.equal(found_logits, logits)


def test_a_prompt_is_not_disturbed_by_nan_in_dead_slots(rig: GpuRig) -> None:
    clean = rig.prefill(7)
    rig.run(ReplicaPlan(0, leaves=list(range(7))), RunMode.EAGER, None)
    rig.kv.storage[: rig.kv.num_blocks].fill_(float("nan"))
    poisoned = rig.prefill(7)
    rig.run(ReplicaPlan(0, leaves=list(range(7))), RunMode.EAGER, None)
    rig.kv.storage[: rig.kv.num_blocks].zero_()
    assert poisoned.token_ids == clean.token_ids and poisoned.bad_lanes == []


def test_equal_prompts_in_one_batch_give_bit_equal_rows(rig: GpuRig) -> None:
    joins = [join(lane, rig.blocks_of(lane), num_prompt=20) for lane in range(8)]
    chunks = [chunk(lane, list(range(40, 60))) for lane in range(8)]
    rig.run(ReplicaPlan(8, joins=joins, chunks=chunks), RunMode.EAGER, None)
    rig.lens = [20] * 8
    for _ in range(4):
        tokens, logits = rig.decode(RunMode.FULL, 16)
        assert len(set(unpack_ids(tokens))) == 1
        assert torch.equal(logits, logits[:1].expand_as(logits))
    rig.run(ReplicaPlan(0, leaves=list(range(8))), RunMode.EAGER, None)


def test_one_context_from_short_to_the_longest(rig: GpuRig) -> None:
    """Numbers baked into a graph must hold for every length it is replayed at."""
    blocks = list(range(FULL_POOL - 1, FULL_POOL - 33, -1))
    made = []
    for mode in (RunMode.FULL, RunMode.EAGER):
        joining = ReplicaPlan(1, joins=[join(0, blocks, num_prompt=2)], chunks=[chunk(0, [7, 8])])
        rig.run(joining, RunMode.EAGER, None)
        rig.lens = [2]
        steps = [rig.decode(mode, 2) for _ in range(505)]
        made.append((b"".join(tokens for tokens, _ in steps), steps[-1][1]))
        rig.run(ReplicaPlan(0, leaves=[0]), RunMode.EAGER, None)
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])
    assert made[0][1].shape == (1, GPU_TINY.vocab_size)


def test_the_shortest_beside_the_longest_context(rig: GpuRig) -> None:
    longest = [(11 * i + 5) % GPU_TINY.vocab_size for i in range(509)]
    top = list(range(FULL_POOL - 1, FULL_POOL - 33, -1))
    joins = [join(0, [1], num_prompt=1), join(1, top, num_prompt=509)]
    chunks = [chunk(0, [7]), chunk(1, longest)]
    made = []
    for mode in (RunMode.FULL, RunMode.EAGER):
        rig.run(ReplicaPlan(2, joins=joins, chunks=chunks), RunMode.EAGER, None)
        rig.lens = [1, 509]
        made.append([rig.decode(mode, 4) for _ in range(2)])
        rig.run(ReplicaPlan(0, leaves=[0, 1]), RunMode.EAGER, None)
    for (tokens, logits), (wanted, wanted_logits) in zip(*made, strict=True):
        assert tokens == wanted and torch.equal(logits, wanted_logits)
