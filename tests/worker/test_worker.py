"""A whole worker, from configuration to results, driven by hand-written plans over real rings."""

import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
from inline import SPEC, alone_topology, dummy_model, worker_config
from ranks import Rank, rank_outcomes
from rig import chunk, decode_alone, eager, join, tokens_of

from lockstep.comm.codec import decode_result, encode
from lockstep.comm.messages import ReplicaPlan, StepPlan, StepResult, StopWorkers, WorkerFailed
from lockstep.comm.ring import Ring, RingReader, RingWriter
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.loop import Worker
from lockstep.worker.results import SlotFault

PROMPT = [5, 17, 3, 70, 22]
STAGES = ["communication", "load", "kernels", "capture", "mapping"]


def started_worker(run_ahead: int = 2) -> Worker:
    worker = Worker(worker_config(run_ahead=run_ahead, num_blocks=40), SPEC, alone_topology())
    worker.start()
    return worker


def plans(num_decode_steps: int) -> list[StepPlan]:
    first = ReplicaPlan(1, joins=[join(0, [3, 9, 4, 7], num_prompt=5)], chunks=[chunk(0, PROMPT)])
    return [eager(0, first)] + [eager(i, ReplicaPlan(1)) for i in range(1, num_decode_steps + 1)]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    model = dummy_model(worker_config())
    return decode_alone(model, PROMPT, 8)


def test_start_says_what_it_made() -> None:
    worker, told = Worker(worker_config(num_blocks=40), SPEC, alone_topology()), []
    ready = worker.start(lambda stage, done, total: told.append(stage))
    assert ready.num_blocks == 40 and ready.graph_mode == "NONE" and ready.device == "cpu"
    assert list(ready.stage_seconds) == STAGES
    assert [stage for stage in dict.fromkeys(told) if stage != "weights"] == STAGES
    worker.close()


def test_execute_gives_the_tokens_of_the_request_alone(expected: list[int]) -> None:
    worker = started_worker()
    results = [result for plan in plans(7) for result in worker.execute(plan)]
    assert [tokens_of(result)[0] for result in results] == expected
    assert worker.metrics.num_sampled_tokens == 0 and worker.metrics.num_tokens == 5 + 7
    worker.close()


def test_a_worker_refuses_plans_before_start() -> None:
    with pytest.raises(RuntimeError, match="start"):
        Worker(worker_config(), SPEC, alone_topology()).execute(eager(0, ReplicaPlan(0)))


class Served:
    """A worker's run() in a thread, with a ring to it and one back."""

    def __init__(self, worker: Worker) -> None:
        self._rings = [Ring.create(num_readers=1, capacity_bytes=1 << 16) for _ in range(2)]
        self.plans = RingWriter(self._rings[0])
        self.results = RingReader(self._rings[1], 0)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(worker,))
        self._thread.start()

    def _run(self, worker: Worker) -> None:
        try:
            worker.run(RingReader(self._rings[0], 0), RingWriter(self._rings[1]))
        except Exception as error:
            self.error = error

    def read(self) -> StepResult | WorkerFailed:
        data = self.results.read(20)
        assert data is not None
        return decode_result(data)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        for ring in self._rings:
            ring.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_both_loops_serve_the_same_tokens(run_ahead: int, expected: list[int]) -> None:
    served = Served(started_worker(run_ahead))
    results = []
    for plan in plans(7):
        served.plans.write(encode(plan))
        results.append(served.read())
    served.plans.write(encode(StopWorkers(0)))
    served.join()
    assert served.error is None
    assert [tokens_of(result)[0] for result in results] == expected
    assert [result.step_id for result in results] == list(range(8))


def test_plans_granted_ahead_are_all_answered_before_stop(expected: list[int]) -> None:
    served = Served(started_worker())
    for plan in [*plans(2), StopWorkers(0)]:
        served.plans.write(encode(plan))
    served.join()
    assert [tokens_of(served.read())[0] for _ in range(3)] == expected[:3]


def test_a_plan_of_another_epoch_is_dropped(expected: list[int]) -> None:
    served = Served(started_worker())
    first, second = plans(1)
    stale = msgspec.structs.replace(first, epoch=7)
    for plan in (stale, first, stale, second):
        served.plans.write(encode(plan))
    assert [tokens_of(served.read())[0] for _ in range(2)] == expected[:2]
    served.plans.write(encode(StopWorkers(0)))
    served.join()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_step_without_a_block_stops_the_worker_and_says_why(run_ahead: int) -> None:
    served = Served(started_worker(run_ahead))
    first = ReplicaPlan(1, joins=[join(0, [3], num_prompt=4)], chunks=[chunk(0, PROMPT[:4])])
    served.plans.write(encode(eager(0, first)))
    assert isinstance(served.read(), StepResult)
    served.plans.write(encode(eager(1, ReplicaPlan(1))))
    failed = served.read()
    assert isinstance(failed, WorkerFailed) and failed.step_id == 1
    assert failed.error == "step 1: lanes [0] wrote to the padding block"
    assert "Traceback" in failed.traceback
    served.join()
    assert isinstance(served.error, SlotFault)


class FileSink:
    """Results as a file, for a process that will not live to be asked."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, data: bytes, timeout_s: float = 10.0) -> None:
        Path(self._path).write_bytes(data)


class PlanList:
    def __init__(self, plans: list[StepPlan]) -> None:
        self._data = [encode(plan) for plan in plans]

    def poll(self) -> bytes | None:
        return self._data.pop(0) if self._data else None

    def read(self, timeout_s: float) -> bytes | None:
        return self.poll()


def hang_in_the_second_step(rank: Rank, path: str) -> None:
    parallel = ParallelConfig(timeout_s=1)
    worker = Worker(worker_config(parallel=parallel), SPEC, alone_topology())
    worker.start()
    forward = worker._started.bench.parts.step.model.forward
    calls = []

    def hang(*args):
        calls.append(1)
        return forward(*args) if len(calls) < 2 else time.sleep(60)

    worker._started.bench.parts.step.model.forward = hang
    worker.run(PlanList(plans(3)), FileSink(path))


def test_a_hanging_step_is_named_and_its_process_ended(tmp_path: Path) -> None:
    path = tmp_path / "result"
    [outcome] = rank_outcomes(hang_in_the_second_step, 1, str(path), gloo=False, timeout_s=30)
    assert outcome.exit_code == -signal.SIGKILL
    failed = decode_result(path.read_bytes())
    assert isinstance(failed, WorkerFailed) and failed.global_rank == 0 and failed.step_id == 1
    assert failed.error.startswith("step 1 (EAGER, 1 tokens padded to None) is not done after")
