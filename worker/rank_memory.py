"""A rank's device memory shared out: what everything took, and what that leaves to the KV cache."""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch

from lockstep.comm.messages import GraphCost, MemoryReport
from lockstep.parallel.topology import Topology
from lockstep.worker.assembly import kv_layout
from lockstep.worker.config import MIN_BLOCKS, WorkerConfig
from lockstep.worker.device_bytes import read_device, storage_bytes
from lockstep.worker.device_memory import unavailable_reason
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.manifest import Manifest, largest_of_each_kind
from lockstep.worker.graphs.memory import bytes_of_more_graphs
from lockstep.worker.kv_cache import KVCache, fixed_num_blocks
from lockstep.worker.kv_memory import FixedMemory, KVMemory, MappedMemory, blocks_beside
from lockstep.worker.memory_account import MemoryAccount, Parts
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.stages import Stages
from lockstep.worker.workbench import Workbench

logger = logging.getLogger(__name__)


class RankMemory:
    """Made before anything is loaded; ``open`` gives the KV cache a first size, ``fill`` its last.

    Args:
        config: see ``CacheConfig`` for what the user may fix.
    """

    def __init__(self, config: WorkerConfig, topology: Topology) -> None:
        self._config = config
        self._topology = topology
        self._device = torch.device(topology.spec.device)
        self._layout = kv_layout(config)
        self._fixed = fixed_num_blocks(self._layout, config.cache, self._device)
        self._read = partial(read_device, self._device)
        self._account = MemoryAccount(self._read, topology.buffer_bytes)
        self._weight_bytes = 0
        self._graph_reserve = 0
        self._estimated: int | None = None

    def communicating(self) -> AbstractContextManager[None]:
        """What the device loses meanwhile is held by communication."""
        return self._account.communicating()

    def open(self, model: DecoderModel, manifest: Manifest, stages: Stages) -> KVMemory:
        """A cache to warm up and capture with: its memory follows if it can be mapped later.

        Raises:
            ValueError: the budget does not hold a KV cache; the message has every term.
        """
        self._weight_bytes = storage_bytes([*model.parameters(), *model.buffers()])
        num_blocks = self._fixed
        if num_blocks is None:
            reason = self._why_not_mapped()
            if reason is None:
                return MappedMemory(self._layout, self._config.cache, self._device)
            logger.warning("KV cache memory is estimated, since it cannot be mapped: %s", reason)
            num_blocks = self._estimate(model, manifest, stages)
            torch.cuda.empty_cache()
        return FixedMemory(self._layout, self._agreed(num_blocks), self._device)

    def fill(
        self, memory: KVMemory, graphs: Iterable[GraphCost], late: Iterable[BatchDescriptor]
    ) -> None:
        """Give the KV cache what all else has left, once graphs are captured.

        Args:
            late: graphs to come, for which memory is left free.

        Raises:
            ValueError: see ``open``.
        """
        others = self._parts(memory, graphs)
        del others["kv_cache"]
        if self._read().total:
            self._graph_reserve = bytes_of_more_graphs(graphs, late)
        num_blocks = memory.num_blocks_left(others | {"graphs to come": self._graph_reserve})
        memory.cache.grow(self._agreed(num_blocks))

    def report(self, memory: KVMemory, graphs: Iterable[GraphCost]) -> MemoryReport:
        """What holds how much, now that everything is there."""
        parts, total = self._parts(memory, graphs), self._read().total
        others = sum(parts.values()) - parts["kv_cache"]
        measured = self._fixed is None
        return MemoryReport(
            parts=parts,
            total=total,
            budget=int(total * self._config.cache.gpu_memory_utilization) if measured else 0,
            graph_reserve=self._graph_reserve,
            estimate_error=None if self._estimated is None else self._estimated - others,
        )

    def _parts(self, memory: KVMemory, graphs: Iterable[GraphCost]) -> Parts:
        return self._account.parts(
            weights=self._weight_bytes,
            graphs=sum(cost.num_bytes for cost in graphs),
            kv_cache=memory.num_bytes,
            kv_in_torch=memory.torch_bytes,
        )

    def _why_not_mapped(self) -> str | None:
        """One answer for all ranks, since an estimate takes steps that they must take together."""
        reasons = self._topology.lockstep.all_gather_object(unavailable_reason(self._device))
        return next((str(reason) for reason in reasons if reason is not None), None)

    def _estimate(self, model: DecoderModel, manifest: Manifest, stages: Stages) -> int:
        """Blocks that fit, by a trial with hardly any and the largest graphs."""
        trial_cache = KVCache.allocate(self._layout, MIN_BLOCKS, self._device)
        trial = Workbench(self._config, self._topology, model, trial_cache)
        trial.warm_up(stages)
        others = self._account.parts(
            weights=self._weight_bytes, graphs=0, kv_cache=0, kv_in_torch=0
        )
        measured, more = largest_of_each_kind(manifest.entries)
        trial.capture(Manifest(measured, manifest.choices), stages)
        costs = trial.graph_runner.costs()
        trial.release()
        del others["kv_cache"]
        others["graphs"] = sum(cost.num_bytes for cost in costs) + bytes_of_more_graphs(
            costs, [entry.descriptor for entry in more]
        )
        self._estimated = sum(others.values())
        return blocks_beside(others, self._read().total, self._layout, self._config.cache)

    def _agreed(self, num_blocks: int) -> int:
        """The least of the lockstep group, since all its replicas are planned alike."""
        all_num_blocks: list[int] = self._topology.lockstep.all_gather_object(num_blocks)
        return min(all_num_blocks)
