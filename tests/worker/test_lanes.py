"""A plan's changes as row operations, against doing them one after another."""

import random

from rig import join

from lockstep.comm.messages import LaneBlocks, ReplicaPlan, pack_ids
from lockstep.worker.lanes import LaneTable

MAX_LANES, WIDTH = 8, 5


class OneByOne:
    """Rows of a block table, changed in the order that a plan gives."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(MAX_LANES)]

    def apply(self, plan: ReplicaPlan) -> None:
        for lane in plan.leaves:
            self.rows[lane] = []
        for src, dst in plan.moves:
            self.rows[dst], self.rows[src] = self.rows[src], []
        for joining in plan.joins:
            self.rows[joining.lane] = list(memoryview(joining.block_ids).cast("i"))
        for more in plan.new_blocks:
            self.rows[more.lane] += list(memoryview(more.block_ids).cast("i"))


def apply_edit(table: list[list[int]], plan: ReplicaPlan, lanes: LaneTable) -> None:
    edit = lanes.edit(plan)
    before = [list(row) for row in table]
    for src, dst in zip(edit.move_src, edit.move_dst, strict=True):
        table[dst] = before[src]
    for lane in edit.resets:
        table[lane] = [0] * WIDTH
    for cell, block_id in zip(edit.cells, edit.cell_ids, strict=True):
        table[cell // WIDTH][cell % WIDTH] = block_id


def random_plan(rng: random.Random, rows: list[list[int]], num_lanes: int) -> ReplicaPlan:
    """Some lanes leave, the last ones fill the holes, some join, some get blocks."""
    leaves = [lane for lane in range(num_lanes) if rng.random() < 0.3]
    stay = [lane for lane in range(num_lanes) if lane not in leaves]
    holes = [lane for lane in leaves if lane < len(stay)]
    moves = list(zip(reversed([lane for lane in stay if lane >= len(stay)]), holes, strict=True))
    joins = [
        join(len(stay) + i, [rng.randrange(1, 99) for _ in range(rng.randrange(WIDTH))])
        for i in range(rng.randrange(MAX_LANES - len(stay) + 1))
    ]
    moved = {dst: src for src, dst in moves}
    grown = [
        LaneBlocks(lane, pack_ids([rng.randrange(1, 99)]))
        for lane in range(len(stay))
        if len(rows[moved.get(lane, lane)]) < WIDTH and rng.random() < 0.5
    ]
    return ReplicaPlan(
        len(stay) + len(joins), leaves=leaves, moves=moves, joins=joins, new_blocks=grown
    )


def test_edits_come_to_the_same_as_one_change_after_another() -> None:
    rng = random.Random(3)
    oracle, lanes, table = OneByOne(), LaneTable(MAX_LANES, WIDTH), [[0] * WIDTH] * MAX_LANES
    table, num_lanes = [list(row) for row in table], 0
    for _ in range(500):
        plan = random_plan(rng, oracle.rows, num_lanes)
        oracle.apply(plan)
        apply_edit(table, plan, lanes)
        num_lanes = plan.num_lanes
        assert table == [row + [0] * (WIDTH - len(row)) for row in oracle.rows]


def test_moves_in_a_chain_come_from_where_each_row_stood() -> None:
    lanes = LaneTable(MAX_LANES, WIDTH)
    lanes.edit(ReplicaPlan(3, joins=[join(lane, [lane + 1]) for lane in range(3)]))
    edit = lanes.edit(ReplicaPlan(2, leaves=[0], moves=[(1, 0), (2, 1)]))
    assert (edit.move_src, edit.move_dst, edit.resets) == ([1, 2], [0, 1], [2])


def test_prompt_positions_follow_a_lane_through_its_moves() -> None:
    lanes = LaneTable(MAX_LANES, WIDTH)
    joins = [join(0, [1]), join(1, [2], num_computed=16, num_prompt=40)]
    lanes.edit(ReplicaPlan(2, joins=joins))
    assert lanes.take_chunk(1, 8) == 16
    lanes.edit(ReplicaPlan(1, leaves=[0], moves=[(1, 0)]))
    assert lanes.take_chunk(0, 16) == 24
    assert not lanes.edit(ReplicaPlan(1)).cells and not lanes.edit(ReplicaPlan(1)).changes_rows
