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
from lockstep.worker.graphs.dispatch import Dispatcher, create_dispatcher
from lockstep.worker.kv_cache import KVCache, fixed_num_blocks
from lockstep.worker.kv_memory import FixedMemory, KVMemory, MappedMemory
from lockstep.worker.model_runner import ModelRunner
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.stages import Progress, Stages
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
        set_thread_counts(self._device, self._spec.world_size)
        stages = self._stages
        with stages.stage("load"):
            model = self._load()
        with stages.stage("kernels"):
            memory = self._open_memory(model)
            runner = self._assemble(model, memory.cache)
            self._warm_up(runner)
        with stages.stage("mapping"):
            num_blocks = self._agreed(memory.num_blocks_left())
            memory.cache.grow(num_blocks)
        return Started(runner, memory, self._dispatcher, self._ready(num_blocks))

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

    def _assemble(self, model: DecoderModel, kv: KVCache) -> ModelRunner:
        parts = build_parts(self._config, self._topology, model, kv)
        return ModelRunner(parts, self._spec.dp_rank % self._config.parallel.lockstep_dp_size)

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

    def _ready(self, num_blocks: int) -> WorkerReady:
        return WorkerReady(
            global_rank=self._spec.global_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._spec.device,
            num_blocks=num_blocks,
            graph_mode=self._dispatcher.mode,
            num_graphs=0,
            stage_seconds=self._stages.seconds,
            memory_bytes=self._stages.memory_bytes,
        )
