"""From a configuration to a rank that can serve, in the one order that works."""

import os
import socket
from dataclasses import dataclass

import torch

from lockstep.comm.messages import SumTimes, WorkerReady
from lockstep.parallel.topology import Topology
from lockstep.worker.assembly import build_attention, build_model
from lockstep.worker.attention.base import AttentionBackend
from lockstep.worker.compilation import compile_segments
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.manifest import build_manifest
from lockstep.worker.graphs.mode import GraphMode, resolve_mode
from lockstep.worker.kv_memory import KVMemory
from lockstep.worker.late_graphs import LateGraphs
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.rank_memory import RankMemory
from lockstep.worker.stages import Progress, Stages
from lockstep.worker.sums.choose import choose_sums
from lockstep.worker.threads import set_thread_counts
from lockstep.worker.weights.load import load_weights
from lockstep.worker.workbench import Workbench


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that can serve."""

    bench: Workbench
    memory: KVMemory
    late: LateGraphs
    ready: WorkerReady


class StartUp:
    """The stages of a start: communication, load, kernels, capture, mapping."""

    def __init__(
        self, config: WorkerConfig, topology: Topology, progress: Progress | None = None
    ) -> None:
        self._config = config
        self._topology = topology
        self._spec = topology.spec
        self._device = torch.device(topology.spec.device)
        self._memory = RankMemory(config, topology)
        self._stages = Stages(progress)
        self._dispatcher = create_dispatcher(config.graph, config.schedule)

    def run(self) -> Started:
        """Raises ValueError if the configuration cannot be served, CommError if ranks differ."""
        set_thread_counts(self._device, self._spec.ranks_on_host)
        stages = self._stages
        with stages.stage("communication"), self._memory.communicating():
            self._topology.connect()
            sum_times = choose_sums(self._config, self._topology)
        choices, capture = self._topology.choices(), self._config.graph.capture
        manifest = build_manifest(self._dispatcher, choices, capture)
        with stages.stage("load"):
            model = self._load()
        with stages.stage("kernels"):
            memory = self._memory.open(model, manifest, stages)
            if self._config.compile:
                compile_segments(model)
            bench = Workbench(self._config, self._topology, model, memory.cache)
            bench.warm_up(stages)
        with stages.stage("capture"):
            bench.capture(manifest, stages)
        with stages.stage("mapping"):
            late = [entry.descriptor for entry in manifest.late]
            self._memory.fill(memory, bench.graph_runner.costs(), late)
        ready = self._ready(bench, memory, manifest.num_late, sum_times)
        reserve = ready.memory.graph_reserve
        graphs = LateGraphs(bench, self._spec, self._dispatcher, manifest, reserve)
        return Started(bench, memory, graphs, ready)

    def _load(self) -> DecoderModel:
        backend = build_attention(self._config, self._device)
        check_support(self._dispatcher.mode, backend)
        model = build_model(self._config, self._topology, backend, self._device)
        load_weights(model, self._config, self._stages.tell)
        return model

    def _ready(
        self, bench: Workbench, memory: KVMemory, num_late: int, sum_times: list[SumTimes]
    ) -> WorkerReady:
        costs = bench.graph_runner.costs()
        return WorkerReady(
            global_rank=self._spec.global_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._spec.device,
            num_blocks=memory.cache.num_blocks,
            graph_mode=self._dispatcher.mode,
            num_graphs=bench.num_graphs,
            stage_seconds=self._stages.seconds,
            memory=self._memory.report(memory, costs),
            graph_costs=costs,
            num_late_graphs=num_late,
            all_reduce=self._topology.tp.all_reduce_choice,
            sum_times=sum_times,
        )


def check_support(mode: GraphMode, backend: AttentionBackend) -> None:
    """Raise ValueError if the attention backend cannot do what the agreed mode captures."""
    able = resolve_mode(mode, backend.support, 1, mode.has_piecewise)
    if able.mode is not mode:
        reasons = "; ".join(able.reasons)
        raise ValueError(
            f"graph mode {mode} cannot be served with attention_backend {backend.name!r}: {reasons}"
        )
