"""The working parts of one rank around a KV cache: built, warmed up, captured and checked."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from lockstep.comm.messages import GraphCost
from lockstep.parallel.topology import Topology
from lockstep.worker.assembly import build_parts
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.manifest import Manifest
from lockstep.worker.graphs.runner import GraphRunner
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.model_runner import ModelRunner
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.self_check import SelfCheck
from lockstep.worker.set_aside import lanes_set_aside
from lockstep.worker.stages import Stages
from lockstep.worker.warm_up import warm_up_plans

# On a CPU nothing is compiled and no memory is measured: one token finds what is broken.
_CPU_WARM_UP_TOKENS = 1
_STEPS_TO_COMPARE = 2
# Ranks that differ must all have said so and be gone within 30 seconds.
_DEADLINE_S = 20.0


class Workbench:
    """Everything that dies with its graphs. ``release`` comes before the topology is destroyed."""

    def __init__(
        self, config: WorkerConfig, topology: Topology, model: DecoderModel, kv: KVCache
    ) -> None:
        self._config = config
        self._topology = topology
        self._cuda = kv.storage.is_cuda
        backend = CudaBackend(kv.storage.device) if self._cuda else HostBackend()
        self.graph_runner = GraphRunner(backend, topology)
        self.parts = build_parts(config, topology, model, kv, self.graph_runner)
        replica_index = topology.spec.dp_rank % config.parallel.lockstep_dp_size
        self.runner = ModelRunner(self.parts, replica_index)

    def warm_up(self, stages: Stages) -> None:
        """Run the heaviest eager steps and forget them."""
        schedule, num_replicas = self._config.schedule, self._config.parallel.lockstep_dp_size
        num_tokens = schedule.max_num_batched_tokens
        if not self._cuda:
            num_tokens = min(num_tokens, _CPU_WARM_UP_TOKENS)
        vocab_size = self._config.model.vocab_size
        plans = warm_up_plans(schedule, vocab_size, num_tokens, num_replicas)
        for done, plan in enumerate(plans):
            stages.tell("kernels", done, len(plans))
            with self._compared(done):
                for pending in self.runner.launch(plan):
                    pending.discard()
        self.runner.clear()

    def _compared(self, done: int) -> AbstractContextManager[None]:
        """One prompt and one decode step tell on ranks that would communicate differently."""
        if done >= _STEPS_TO_COMPARE:
            return nullcontext()
        topology = self._topology
        return topology.ledger.compared_before_launch(
            topology.lockstep, f"warm-up step {done}", _DEADLINE_S
        )

    def capture(self, manifest: Manifest, stages: Stages) -> None:
        """Capture the manifest's graphs and compare each with its step."""
        parts = self.parts
        parts.graphs.capture(manifest, partial(stages.tell, "capture"))
        SelfCheck(parts).run(self._config.model.vocab_size)
        self.runner.clear()
        if self._cuda:
            # Capture emptied the allocator's caches: fill them before the KV cache comes.
            self.warm_up(stages)

    def capture_next(self, position: int) -> GraphCost:
        """Capture a late entry of the manifest between two steps, and compare it with its step.

        Live lanes are set aside meanwhile, so that warm-up, capture and check find what they found
        before the start was over, and touch no block but the padding block.
        """
        parts = self.parts
        with lanes_set_aside(parts.state, parts.sampling):
            descriptor = parts.graphs.capture_next(position)
            if self._cuda:
                SelfCheck(parts).check(descriptor, self._config.model.vocab_size)
        return self.graph_runner.costs()[-1]

    @property
    def num_graphs(self) -> int:
        return self.parts.graphs.num_graphs

    def release(self) -> None:
        """Drop all graphs."""
        self.parts.graphs.release()
