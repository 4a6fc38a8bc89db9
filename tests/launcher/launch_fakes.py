"""A worker and a scheduler driver without a model, to test how an engine is started and watched.

Tokens of a request are its prompt's ids plus 1, plus 2, ...; every step is answered by tp_rank 0.
"""

import os
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from threading import Event, Lock

from lockstep.comm.codec import decode_plan, decode_result, encode
from lockstep.comm.errors import CommError
from lockstep.comm.messages import (
    MemoryReport,
    ReplicaPlan,
    StepAgreement,
    StepPlan,
    StepResult,
    StopWorkers,
    TokenDelta,
    WorkerReady,
    pack_ids,
    unpack_ids,
)
from lockstep.launcher.rank_host import JoinedWorker
from lockstep.worker.schedule.stats import SchedulerStats

STEP_S = 0.01


class FakeWorker:
    """Answers each plan after ``STEP_S``. Leaves its pid in the folder model_path when loading."""

    def __init__(self, config, spec, store):
        self.config, self.spec = config, spec

    last_step = None

    @staticmethod
    def serve_store(config, host):
        return None, 1

    def start(self, progress=None):
        folder = Path(self.config.model_path)
        if folder.is_dir():
            (folder / f"rank{self.spec.global_rank}.pid").write_text(str(os.getpid()))
        self.load(progress)
        return WorkerReady(
            global_rank=self.spec.global_rank, pid=os.getpid(), host=socket.gethostname(),
            device=self.spec.device, num_blocks=64, graph_mode="NONE", num_graphs=0,
            stage_seconds={}, memory=MemoryReport(parts={}),
        )  # fmt: skip

    def load(self, progress):
        if progress:
            progress("weights", 1, 1)

    def run(self, plans, results):
        while not isinstance(plan := self.next_plan(plans), StopWorkers):
            self.step(plan, results)

    def next_plan(self, plans):
        while (data := plans.read(1.0)) is None:
            pass
        return decode_plan(data)

    def step(self, plan, results):
        time.sleep(STEP_S)
        if self.spec.tp_rank == 0:
            result = StepResult(plan.epoch, plan.step_id, self.spec.dp_rank, 0, b"", b"")
            results.write(encode(result), 5.0)
        self.last_step = plan.step_id

    def close(self):
        pass


class SlowLoader(FakeWorker):
    def load(self, progress):
        for done in range(600):
            time.sleep(0.1)
            progress("weights", done, 600)


class FailingLoader(FakeWorker):
    def load(self, progress):
        if self.spec.global_rank == 1:
            raise ValueError("model.embed_tokens.weight is missing")
        time.sleep(30)


class FailingStep(FakeWorker):
    """Rank 1 fails at step 3; its peer then sees a lost peer, a little earlier."""

    def step(self, plan, results):
        if plan.step_id == 3:
            if self.spec.global_rank == 0:
                raise CommError("rank 1 closed the connection")
            time.sleep(0.3)
            raise RuntimeError("an illegal address at step 3")
        super().step(plan, results)


class WontDie(FakeWorker):
    def __del__(self):
        time.sleep(600)


class WithChild(FakeWorker):
    """Has a process of its own that hears of nobody's end."""

    def load(self, progress):
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.child = subprocess.Popen(sleep, start_new_session=True)


class EnvironmentReporter(FakeWorker):
    """Puts what it sees of its environment in ``stage_seconds``' keys."""

    NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES")

    def start(self, progress=None):
        import msgspec

        seen = {f"{name}={os.environ.get(name)}": 0.0 for name in self.NAMES}
        return msgspec.structs.replace(super().start(progress), stage_seconds=seen)


class FakeDriver:
    """One token a step for every request, on one lockstep group."""

    def __init__(self, config, num_blocks, plan_writers, result_readers):
        self._writers, self._readers = plan_writers, result_readers
        self._tp_size = config.parallel.tp_size
        self._lock, self._added, self._deltas = Lock(), deque(), deque()
        self._live, self._steps = {}, 0

    def add(self, request):
        self._added.append(request)

    def abort(self, req_id):
        self._live.pop(req_id, None)

    def poll_deltas(self, timeout_s=0.0):
        deadline = time.monotonic() + timeout_s
        while not self._deltas and time.monotonic() < deadline:
            time.sleep(0.002)
        return [self._deltas.popleft() for _ in range(len(self._deltas))]

    def stats(self):
        steps = {"EAGER": self._steps}
        return SchedulerStats([], steps, self._steps, 0, {}, 0, 0)

    def run(self, stop: Event):
        while not stop.is_set():
            while self._added:
                request = self._added.popleft()
                self._live[request.req_id] = [request, 0]
            if self._live:
                self._step()
            else:
                time.sleep(0.005)
        for writer in self._writers:
            writer.write(encode(StopWorkers(0)), 1.0)

    def _step(self):
        agreement = StepAgreement(0, None, [len(self._live)], 1)
        for writer in self._writers:
            plan = StepPlan(0, self._steps, agreement, [ReplicaPlan(len(self._live))])
            writer.write(encode(plan), 5.0)
        for reader in self._readers[:: self._tp_size]:
            while (data := reader.read(1.0)) is None:
                pass
            assert decode_result(data).step_id == self._steps
        self._steps += 1
        for req_id, entry in list(self._live.items()):
            self._advance(req_id, entry)

    def _advance(self, req_id, entry):
        request, done = entry
        entry[1] = done + 1
        last = entry[1] >= request.sampling.max_tokens
        token = unpack_ids(request.prompt_ids)[0] + entry[1]
        self._deltas.append(TokenDelta(req_id, pack_ids([token]), "length" if last else None))
        if last:
            del self._live[req_id]


class RealWithChannels(JoinedWorker):
    """The real worker, which leaves the kinds of its channels in the folder model_path."""

    def run(self, plans, results):
        kinds = f"{type(plans).__name__} {type(results).__name__}"
        path = Path(self._config.model_path) / f"rank{self._spec.global_rank}.channels"
        path.write_text(kinds)
        super().run(plans, results)
