"""From a configuration to a rank that can serve, in the one order that works."""

import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.comm.messages import WorkerReady
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.assembly import build_model, build_parts, kv_layout
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.agreement import compare_manifests
from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.graphs.dispatch import Dispatcher, create_dispatcher
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.manifest import build_manifest
from lockstep.worker.graphs.runner import GraphRunner
from lockstep.worker.kv_cache import fixed_num_blocks
from lockstep.worker.kv_memory import FixedMemory, KVMemory, MappedMemory
from lockstep.worker.model_runner import ModelRunner, RunnerParts
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.self_check import SelfCheck
from lockstep.worker.stages import Progress, Stages
from lockstep.worker.step_graphs import StepGraphs
from lockstep.worker.threads import set_thread_counts
from lockstep.worker.warm_up import warm_up_plans

if TYPE_CHECKING:
    from lockstep.parallel.topology import Topology

logger = logging.getLogger(__name__)

# On a CPU nothing is compiled and no memory is measured: a few tokens find what is broken.
_CPU_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that can serve."""

    runner: ModelRunner
    graphs: StepGraphs
    memory: KVMemory
    dispatcher: Dispatcher
    ready: WorkerReady


class StartUp:
    """The stages of a start: load, kernels, capture, mapping."""

    def __init__(
        self,
        config: WorkerConfig,
        spec: RankSpec,
        topology: "Topology",
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._spec = spec
        self._topology = topology
        self._device = torch.device(spec.device)
        self._stages = Stages(self._device, progress)
        self._dispatcher = create_dispatcher(config.graph, config.schedule)

    def run(self) -> Started:
        """Raises ValueError if the configuration cannot be served, CommError if ranks differ."""
        config, stages = self._config, self._stages
        set_thread_counts(self._device, self._spec.world_size)
        with stages.stage("load"):
            model = self._load()
        with stages.stage("kernels"):
            memory = self._open_memory(model)
            parts = build_parts(config, self._topology, model, memory.cache, self._graph_runner())
            runner = ModelRunner(parts, self._spec.dp_rank % config.parallel.lockstep_dp_size)
            self._warm_up(runner)
        with stages.stage("capture"):
            self._capture(parts)
            runner.clear()
            if self._device.type == "cuda":
                # Capture emptied the allocator's caches: fill them before the KV cache comes.
                self._warm_up(runner)
        with stages.stage("mapping"):
            num_blocks = self._agreed(memory.num_blocks_left())
            memory.cache.grow(num_blocks)
        ready = self._ready(parts.graphs, num_blocks)
        return Started(runner, parts.graphs, memory, self._dispatcher, ready)

    def _load(self) -> DecoderModel:
        from lockstep.worker.weights.load import load_weights

        model = build_model(self._config, self._topology, self._device)
        load_weights(model, self._config, self._stages.tell)
        return model

    def _open_memory(self, model: DecoderModel) -> KVMemory:
        config, device = self._config, self._device
        layout = kv_layout(config)
        fixed = fixed_num_blocks(layout, config.cache, device)
        if fixed is not None:
            return FixedMemory(layout, self._agreed(fixed), device)
        return MappedMemory(layout, config.cache, device)

    def _agreed(self, num_blocks: int) -> int:
        """The least of the lockstep group, since all its replicas are planned alike."""
        all_num_blocks: list[int] = self._topology.lockstep.all_gather_object(num_blocks)
        return min(all_num_blocks)

    def _graph_runner(self) -> GraphRunner:
        cuda = self._device.type == "cuda"
        backend = CudaBackend(self._device) if cuda else HostBackend()
        return GraphRunner(backend, self._topology)

    def _capture(self, parts: RunnerParts) -> None:
        topology = self._topology
        manifest = build_manifest(self._dispatcher, self._choices())
        compare_manifests(manifest, topology.lockstep)
        parts.graphs.capture(
            manifest, lambda done, total: self._stages.tell("capture", done, total)
        )
        SelfCheck(parts.graphs, parts.step, parts.inputs).run(self._config.model.vocab_size)

    def _choices(self) -> dict[str, str]:
        """What was chosen by measurement; it must be the same on all ranks."""
        return {"all_reduce/tp": self._topology.tp.all_reduce_choice}

    def _warm_up(self, runner: ModelRunner) -> None:
        schedule = self._config.schedule
        num_tokens = schedule.max_num_batched_tokens
        if self._device.type == "cpu":
            num_tokens = min(num_tokens, _CPU_WARM_UP_TOKENS)
        plans = warm_up_plans(schedule, num_tokens, self._config.parallel.lockstep_dp_size)
        for done, plan in enumerate(plans):
            self._stages.tell("kernels", done, len(plans))
            for pending in runner.launch(plan):
                pending.discard()
        runner.clear()

    def _ready(self, graphs: StepGraphs, num_blocks: int) -> WorkerReady:
        return WorkerReady(
            global_rank=self._spec.global_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._spec.device,
            num_blocks=num_blocks,
            graph_mode=self._dispatcher.mode,
            num_graphs=graphs.num_graphs,
            stage_seconds=self._stages.seconds,
            memory_bytes=self._stages.memory_bytes,
        )
