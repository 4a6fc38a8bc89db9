"""The host's side of the lane table: what a plan's changes come to, as index lists. No torch."""

from dataclasses import dataclass, field

from lockstep.comm.messages import ReplicaPlan, unpack_ids


@dataclass(slots=True)
class LaneEdit:
    """Row operations in the order in which they must be done: moves, resets, cells."""

    move_src: list[int] = field(default_factory=list)
    move_dst: list[int] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    joined_num_computed: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)  # flat places in the block table
    cell_ids: list[int] = field(default_factory=list)

    @property
    def changes_rows(self) -> bool:
        return bool(self.move_src or self.resets or self.joined)


class LaneTable:
    """Per lane: how many blocks its row holds and how many of its prompt tokens were scheduled."""

    def __init__(self, max_lanes: int, max_blocks_per_req: int) -> None:
        self._width = max_blocks_per_req
        self._num_blocks = [0] * max_lanes
        self._chunk_start = [0] * max_lanes

    def edit(self, plan: ReplicaPlan) -> LaneEdit:
        """What ``plan`` changes, and remember it.

        Moves are resolved to where each row stood before the plan, so that all of them are one
        gather on the device whatever their order.
        """
        edit = LaneEdit()
        origin = self._origins(plan)
        for join in plan.joins:
            origin[join.lane] = None
            self._chunk_start[join.lane] = join.num_computed_tokens
            edit.joined.append(join.lane)
            edit.joined_num_computed.append(join.num_computed_tokens)
            self._append(edit, join.lane, join.block_ids)
        for blocks in plan.new_blocks:
            self._append(edit, blocks.lane, blocks.block_ids)
        for lane, source in origin.items():
            if source is None:
                edit.resets.append(lane)
            elif source != lane:
                edit.move_src.append(source)
                edit.move_dst.append(lane)
        return edit

    def take_chunk(self, lane: int, num_tokens: int) -> int:
        """Position of the first of the next ``num_tokens`` prompt tokens of a lane."""
        start = self._chunk_start[lane]
        self._chunk_start[lane] += num_tokens
        return start

    def _origins(self, plan: ReplicaPlan) -> dict[int, int | None]:
        """Per touched lane: the lane whose row it now holds, or None for an empty row."""
        origin: dict[int, int | None] = {}
        for lane in plan.leaves:
            origin[lane] = None
            self._num_blocks[lane] = 0
        for src, dst in plan.moves:
            origin[dst] = origin.get(src, src)
            origin[src] = None
            self._num_blocks[dst] = self._num_blocks[src]
            self._num_blocks[src] = 0
            self._chunk_start[dst] = self._chunk_start[src]
        return origin

    def _append(self, edit: LaneEdit, lane: int, block_ids: bytes) -> None:
        ids = unpack_ids(block_ids)
        first = self._num_blocks[lane]
        if first + len(ids) > self._width:
            raise ValueError(
                f"lane {lane} would own {first + len(ids)} blocks, at most {self._width} fit"
            )
        edit.cells.extend(range(lane * self._width + first, lane * self._width + first + len(ids)))
        edit.cell_ids.extend(ids)
        self._num_blocks[lane] = first + len(ids)
