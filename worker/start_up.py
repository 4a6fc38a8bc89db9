"""From a configuration to a rank that can serve, in the one order that works."""

import logging
import os
import socket
from dataclasses import dataclass

import torch

from lockstep.comm.messages import WorkerReady
from lockstep.parallel.topology import Topology
from lockstep.worker.assembly import build_attention, build_model, kv_layout
from lockstep.worker.attention.base import AttentionBackend
from lockstep.worker.config import WorkerConfig
from lockstep.worker.device_memory import unavailable_reason
from lockstep.worker.graphs.dispatch import Dispatcher, create_dispatcher
from lockstep.worker.graphs.manifest import Manifest, build_manifest
from lockstep.worker.graphs.memory import estimate_graph_bytes
from lockstep.worker.graphs.mode import GraphMode, resolve_mode
from lockstep.worker.kv_cache import MIN_BLOCKS, KVCache, fixed_num_blocks
from lockstep.worker.kv_memory import (
    FixedMemory,
    KVMemory,
    MappedMemory,
    blocks_beside,
    used_and_total_bytes,
)
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.stages import Progress, Stages
from lockstep.worker.threads import set_thread_counts
from lockstep.worker.weights.load import load_weights
from lockstep.worker.workbench import Workbench

logger = logging.getLogger(__name__)

_GRAPHS_TO_MEASURE = 2


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that can serve."""

    bench: Workbench
    memory: KVMemory
    dispatcher: Dispatcher
    ready: WorkerReady


class StartUp:
    """The stages of a start: load, kernels, capture, mapping."""

    def __init__(
        self, config: WorkerConfig, topology: Topology, progress: Progress | None = None
    ) -> None:
        self._config = config
        self._topology = topology
        self._spec = topology.spec
        self._device = torch.device(topology.spec.device)
        self._stages = Stages(self._device, progress)
        self._dispatcher = create_dispatcher(config.graph, config.schedule)

    def run(self) -> Started:
        """Raises ValueError if the configuration cannot be served, CommError if ranks differ."""
        set_thread_counts(self._device, self._spec.world_size)
        manifest = build_manifest(self._dispatcher, self._topology.choices())
        stages = self._stages
        with stages.stage("load"):
            model = self._load()
        with stages.stage("kernels"):
            memory = self._open_memory(model, manifest)
            bench = Workbench(self._config, self._topology, model, memory.cache)
            bench.warm_up(stages)
        with stages.stage("capture"):
            bench.capture(manifest, stages)
        with stages.stage("mapping"):
            num_blocks = self._agreed(memory.num_blocks_left())
            memory.cache.grow(num_blocks)
        stages.memory_bytes["kv_cache"] = num_blocks * memory.cache.layout.block_bytes
        ready = self._ready(bench.num_graphs, num_blocks)
        return Started(bench, memory, self._dispatcher, ready)

    def _load(self) -> DecoderModel:
        backend = build_attention(self._config, self._device)
        check_support(self._dispatcher.mode, backend)
        model = build_model(self._config, self._topology, backend, self._device)
        load_weights(model, self._config, self._stages.tell)
        return model

    def _open_memory(self, model: DecoderModel, manifest: Manifest) -> KVMemory:
        layout, cache, device = kv_layout(self._config), self._config.cache, self._device
        num_blocks = fixed_num_blocks(layout, cache, device)
        if num_blocks is None:
            reason = self._why_not_mapped()
            if reason is None:
                return MappedMemory(layout, cache, device)
            logger.warning("KV cache memory is estimated, since it cannot be mapped: %s", reason)
            num_blocks = self._estimate(model, manifest)
            torch.cuda.empty_cache()
        return FixedMemory(layout, self._agreed(num_blocks), device)

    def _why_not_mapped(self) -> str | None:
        """One answer for all ranks, since an estimate takes steps that they must take together."""
        reasons = self._topology.lockstep.all_gather_object(unavailable_reason(self._device))
        return next((str(reason) for reason in reasons if reason is not None), None)

    def _estimate(self, model: DecoderModel, manifest: Manifest) -> int:
        """Blocks that fit, by a trial with hardly any and the largest graphs."""
        layout = kv_layout(self._config)
        trial = Workbench(
            self._config,
            self._topology,
            model,
            KVCache.allocate(layout, MIN_BLOCKS, self._device),
        )
        trial.warm_up(self._stages)
        used, total = used_and_total_bytes(self._device)
        measured = Manifest(manifest.entries[:_GRAPHS_TO_MEASURE], manifest.choices)
        trial.capture(measured, self._stages)
        sizes = [record.num_bytes for record in trial.graph_runner.records.values()]
        trial.release()
        graph_bytes = estimate_graph_bytes(sizes, len(manifest.entries))
        return blocks_beside(used + graph_bytes, total, layout, self._config.cache)

    def _agreed(self, num_blocks: int) -> int:
        """The least of the lockstep group, since all its replicas are planned alike."""
        all_num_blocks: list[int] = self._topology.lockstep.all_gather_object(num_blocks)
        return min(all_num_blocks)

    def _ready(self, num_graphs: int, num_blocks: int) -> WorkerReady:
        return WorkerReady(
            global_rank=self._spec.global_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._spec.device,
            num_blocks=num_blocks,
            graph_mode=self._dispatcher.mode,
            num_graphs=num_graphs,
            stage_seconds=self._stages.seconds,
            memory_bytes=self._stages.memory_bytes,
        )


def check_support(mode: GraphMode, backend: AttentionBackend) -> None:
    """Raise ValueError if the attention backend cannot do what the agreed mode captures."""
    able = resolve_mode(mode, backend.support, 1, mode.has_piecewise)
    if able.mode is not mode:
        reasons = "; ".join(able.reasons)
        raise ValueError(
            f"graph mode {mode} cannot be served with attention_backend {backend.name!r}: {reasons}"
        )
