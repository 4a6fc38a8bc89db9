"""The mesh joined with its groups: what a rank communicates with along each axis."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.comm.all_reduce.create import create_all_reduce
from lockstep.comm.collectives import Communicator
from lockstep.comm.groups import Group, World
from lockstep.comm.ledger import Ledger
from lockstep.comm.rendezvous import join_store
from lockstep.parallel import mesh
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.rank_spec import RankSpec


@dataclass(frozen=True)
class Topology:
    """The communicators of one rank; all share one ledger.

    ``tp`` joins the ranks of its replica, ``dp`` those of its lockstep group with the same tp_rank,
    ``lockstep`` all ranks that take every step together, ``world`` everybody. The last two move
    tensors of the host only, unless their ranks are those of the former, whose group they share.
    """

    spec: RankSpec
    config: ParallelConfig
    world: Communicator
    tp: Communicator
    lockstep: Communicator
    dp: Communicator
    ledger: Ledger = field(default_factory=Ledger)
    _world: World | None = None

    @classmethod
    def create(
        cls,
        spec: RankSpec,
        config: ParallelConfig,
        *,
        store: Store | None = None,
        all_reduce: str = "auto",
    ) -> "Topology":
        """Join the other ranks. All ranks call this; without ``store`` it joins the spec's.

        Raises:
            CommTimeout: names the ranks that did not come within ``config.timeout_s``.
            ValueError: the spec does not fit the config, or an unknown ``all_reduce``.
        """
        _check(spec, config)
        if spec.device.startswith("cuda"):
            # Before anything else touches CUDA, or this process opens a context on GPU 0.
            torch.cuda.set_device(torch.device(spec.device))
        if spec.world_size == 1:
            return cls.single(spec.device, config)
        store = store or join_store(spec.master_addr, spec.master_port, config.timeout_s)
        world = World.join(
            global_rank=spec.global_rank, world_size=spec.world_size,
            store=PrefixStore(f"epoch{spec.epoch}", store), timeout_s=config.timeout_s,
        )  # fmt: skip
        return _Builder(world, spec, config, all_reduce).build()

    @classmethod
    def single(cls, device: str = "cpu", config: ParallelConfig | None = None) -> "Topology":
        """One rank alone."""
        spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device=device)
        alone = Communicator.single()
        return cls(
            spec, config or ParallelConfig(), alone, alone, alone, alone, ledger=alone.ledger
        )

    @property
    def communicators(self) -> list[Communicator]:
        """Each of them once."""
        found = {id(c): c for c in (self.tp, self.dp, self.lockstep, self.world)}
        return list(found.values())

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the fixed buffers of all groups."""
        return sum(communicator.buffer_bytes for communicator in self.communicators)

    def connect(self) -> None:
        """Let the groups of devices make their connections. All ranks of ``lockstep`` call this."""
        # On the host first: on a device nothing could tell that a peer will not come.
        self.lockstep.barrier()
        for communicator in {id(c): c for c in (self.tp, self.dp)}.values():
            communicator.connect()

    def retire(self) -> None:
        """With the device idle: wait until no thread looks at earlier work of any group."""
        for communicator in self.communicators:
            communicator.retire()

    def give_up(self, error: Exception) -> None:
        """This rank has failed by itself: tell all peers why and wake those that wait for it."""
        for communicator in self.communicators:
            communicator.give_up(error)

    def choices(self) -> dict[str, str]:
        """The all-reduces by size that graphs will hold, for the manifest."""
        used = [c for c in (self.tp, self.dp) if c.size > 1]
        return {f"all_reduce/{c.name}": c.all_reduce_choice for c in used}

    def destroy(self) -> None:
        """Leave all groups. Graphs that hold their operations must be gone by then."""
        if self._world is not None:
            self._world.leave()


class _Builder:
    """Makes the groups in one order on all ranks."""

    def __init__(
        self, world: World, spec: RankSpec, config: ParallelConfig, all_reduce: str
    ) -> None:
        self._world = world
        self._spec = spec
        self._config = config
        self._all_reduce = all_reduce
        self._device = torch.device(spec.device)
        self._ledger = Ledger()
        self._made: dict[tuple[tuple[int, ...], ...], Communicator] = {}

    def build(self) -> Topology:
        host = torch.device("cpu")
        everybody = [tuple(range(self._spec.world_size))]
        tp = self._line("tp", mesh.tp_group_ranks(self._config), self._device)
        dp = self._line("dp", mesh.dp_group_ranks(self._config), self._device)
        lockstep = self._line("lockstep", mesh.lockstep_group_ranks(self._config), host)
        world = self._line("world", everybody, host)
        return Topology(
            self._spec, self._config, world, tp, lockstep, dp,
            ledger=self._ledger, _world=self._world,
        )  # fmt: skip

    def _line(
        self, name: str, lines: Sequence[tuple[int, ...]], device: torch.device
    ) -> Communicator:
        """The communicator of the line that holds this rank."""
        key = tuple(lines)
        if key not in self._made:
            groups = [
                self._world.create_group(
                    name, ranks, device=device, timeout_s=self._config.timeout_s
                )
                for ranks in lines
            ]
            group = next((group for group in groups if group is not None), None)
            self._made[key] = self._communicator(group)
        return self._made[key]

    def _communicator(self, group: Group | None) -> Communicator:
        if group is None:
            return Communicator.single(self._spec.global_rank)
        choice = self._all_reduce if group.device.type == self._device.type else "auto"
        table = create_all_reduce(group, choice, Communicator(group))
        return Communicator(group, table, self._ledger)


def _check(spec: RankSpec, config: ParallelConfig) -> None:
    if spec.world_size != config.world_size:
        raise ValueError(
            f"world_size must be tp_size * dp_size = {config.world_size}, got {spec.world_size}"
        )
    place = mesh.coordinates(spec.global_rank, config)
    if place != (spec.dp_rank, spec.tp_rank):
        raise ValueError(
            f"(dp_rank, tp_rank) of global_rank {spec.global_rank} must be {place}, "
            f"got {(spec.dp_rank, spec.tp_rank)}"
        )
