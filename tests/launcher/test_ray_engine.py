"""Engines on one shared Ray, with fake workers: life, placement, and every way to fail."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import launch_fakes as fakes
import pytest
from launch_cases import resolved_config
from launched import Launched, answers, generate_arguments, run_here, tokens_of_one_rank_alone

from lockstep.comm.messages import AddRequest, pack_ids, unpack_ids
from lockstep.comm.process import process_gone
from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.cluster import start_ray_engine
from lockstep.launcher.errors import EngineDead, PlacementError, StartError
from lockstep.launcher.guard import marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

FOREIGN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.255.255.1",
    "MASTER_PORT": "1", "SLURM_PROCID": "3",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def shared_ray():
    """Six CPUs and two GPUs that are not there."""
    package = Path(fakes.__file__).parents[2] / "deploy" / "package"
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package), str(Path(fakes.__file__).parent)])
    import ray

    ray.init(
        address="local", include_dashboard=False, num_cpus=6, num_gpus=2, log_to_driver=False,
        object_store_memory=80 << 20, _system_config={"prestart_worker_first_driver": False},
    )  # fmt: skip
    yield ray
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@contextmanager
def engine_of(worker=fakes.FakeWorker, **shape):
    engine = start_ray_engine(
        resolved_config(**({"tp": 2} | shape)), worker_type=worker, make_driver=fakes.FakeDriver
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def request(req_id, first, max_tokens=5):
    return AddRequest(req_id, pack_ids([first]), SamplingParams(max_tokens=max_tokens))


def collect(engine, until=1, timeout_s=90):
    """Deltas until that many requests have ended."""
    deltas, deadline = [], time.monotonic() + timeout_s
    while sum(delta.finish_reason is not None for delta in deltas) < until:
        assert time.monotonic() < deadline, deltas
        deltas += engine.poll(0.5)
    return deltas


def tokens(deltas, req_id):
    return [unpack_ids(delta.token_ids)[0] for delta in deltas if delta.req_id == req_id]


def pids(engine):
    return [rank.pid for rank in engine.summary().ready]


def mark_of(pid):
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(line for line in environment if line.startswith(b"LOCKSTEP_ENGINE=")).decode()[16:]


def assert_gone(mark, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == []


def free(ray, resource):
    return ray.available_resources().get(resource, 0)


def await_free(ray, resource, amount):
    deadline = time.monotonic() + 60
    while free(ray, resource) != amount and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free(ray, resource) == amount


def test_real_ranks_give_the_tokens_of_one_rank_alone(tmp_path):
    folder, noted = tmp_path / "ray", []
    folder.mkdir()

    def start(resolved, progress):
        engine = start_ray_engine(resolved, progress)
        scheduler = engine._supervisor._members[-1].process.pid
        assert "libtorch" not in Path(f"/proc/{scheduler}/maps").read_text()
        shutdown = engine.shutdown
        engine.shutdown = lambda: (noted.extend(engine.device_times()), shutdown())
        return engine

    arguments = generate_arguments(folder, max_tokens=8, tp=2)
    run_here([*arguments, "--step-timestamps", "64"], start)
    assert answers(folder) == tokens_of_one_rank_alone(tmp_path)
    # The rank that publishes has noted its last step; the other may still be at it.
    first, second = noted
    assert len(first.begin_ns) == first.num_steps >= 8
    assert second.num_steps in (first.num_steps - 1, first.num_steps)


def test_a_killed_driver_leaves_a_cluster_that_it_has_joined_as_it_was(tmp_path, shared_ray):
    address = shared_ray.get_runtime_context().gcs_address
    script = Path(fakes.__file__).with_name("launch_driver.py")
    arguments = generate_arguments(tmp_path, max_tokens=10**6, tp=2)
    command = [sys.executable, "-P", str(script), "FakeWorker", *arguments]
    driver = Launched(command, tmp_path, RAY_ADDRESS=address)
    try:
        driver.await_text("scheduler:")
        ranks = [int((tmp_path / f"rank{rank}.pid").read_text()) for rank in range(2)]
        mark = mark_of(ranks[0])
        # A stopped process does not hear Ray.
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(driver.root.pid, signal.SIGKILL)
        assert driver.ended() == -signal.SIGKILL
        assert_gone(mark)
    finally:
        driver.clean_up()
    await_free(shared_ray, "CPU", 6)


def test_two_engines_at_once_and_nothing_left(shared_ray):
    with engine_of() as one, engine_of(tp=1, dp=2) as other:
        one.add(request("a", 10))
        other.add(request("a", 20))
        assert tokens(collect(one), "a") == [11, 12, 13, 14, 15]
        assert tokens(collect(other), "a") == [21, 22, 23, 24, 25]
        assert free(shared_ray, "CPU") == 2, "an idle engine holds its resources"
        marks = [mark_of(pids(engine)[0]) for engine in (one, other)]
        assert one.summary().ranks == 2 and one.summary().launcher == "ray"
    for mark in marks:
        assert_gone(mark)
    await_free(shared_ray, "CPU", 6)
    assert shared_ray.is_initialized()


def test_ranks_own_their_environment_whatever_surrounds_the_driver(monkeypatch, caplog):
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    with engine_of(fakes.EnvironmentReporter) as engine:
        seen = [set(rank.stage_seconds) for rank in engine.summary().ready]
    common = {"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "SLURM_PROCID=None"}
    assert all(common <= each for each in seen)
    assert ["RANK=0" in seen[0], "RANK=1" in seen[1]] == [True, True]
    (warning,) = [r for r in caplog.records if "another launcher's variables" in r.message]
    assert "RANK=3" in warning.message and "SLURM_PROCID=3" in warning.message


def test_a_rank_killed_while_loading_is_named(tmp_path, shared_ray):
    killer = _when(tmp_path / "rank1.pid", lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises(StartError, match=r"rank 1 \(dp 0 tp 1, cpu\), pid \d+, died"):
        start_ray_engine(
            resolved_config(tp=2, model_path=tmp_path),
            worker_type=fakes.SlowLoader, make_driver=fakes.FakeDriver,
        )  # fmt: skip
    killer.join()
    assert _alive(tmp_path) == []
    await_free(shared_ray, "CPU", 6)


def test_a_scheduler_killed_while_ranks_load_is_named(tmp_path, shared_ray):
    killer = _when(tmp_path / "rank0.pid", lambda pid: os.kill(_scheduler(pid), signal.SIGKILL))
    with pytest.raises(StartError, match=r"the scheduler, pid \d+, died"):
        start_ray_engine(
            resolved_config(tp=2, model_path=tmp_path),
            worker_type=fakes.SlowLoader,
            make_driver=fakes.FakeDriver,
        )
    killer.join()
    assert _alive(tmp_path) == []


def test_a_rank_killed_while_decoding_is_named_with_its_last_step():
    with engine_of() as engine:
        engine.add(request("a", 1, max_tokens=10**6))
        while engine._supervisor._members[1].last_step is None:
            assert engine.poll(5.0)
        mark, began = mark_of(pids(engine)[1]), time.monotonic()
        os.kill(pids(engine)[1], signal.SIGKILL)
        last = collect(engine)[-1]
        assert time.monotonic() - began < 45
        assert (last.req_id, last.finish_reason) == ("a", "error")
        with pytest.raises(EngineDead, match=r"rank 1 .* last step \d+, died"):
            engine.poll(5.0)
        with pytest.raises(EngineDead, match="rank 1"):
            engine.summary()
    assert_gone(mark)


def test_a_rank_killed_while_idle_is_noticed_and_its_children_go_with_it():
    with engine_of(fakes.WithChild) as engine:
        mark = mark_of(pids(engine)[0])
        deadline = time.monotonic() + 60
        # Two ranks, a child each, which may still be starting, and the scheduler.
        while len(marked(mark)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(pids(engine)[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 0 .* died"):
            while time.monotonic() - began < 60:
                engine.poll(0.5)
        assert time.monotonic() - began < 45
    assert_gone(mark)


def test_a_killed_scheduler_is_named_and_its_requests_end():
    with engine_of() as engine:
        engine.add(request("a", 1, max_tokens=10**6))
        engine.poll(2.0)
        process = engine._supervisor._members[-1].process
        process.kill()
        last = collect(engine)[-1]
        assert last.finish_reason == "error" and "the scheduler, pid" in last.error


def test_a_stopped_rank_is_named_and_ended():
    with engine_of() as engine:
        engine.add(request("a", 1, max_tokens=10**6))
        engine.poll(2.0)
        mark, began = mark_of(pids(engine)[1]), time.monotonic()
        os.kill(pids(engine)[1], signal.SIGSTOP)
        last = collect(engine)[-1]
        assert time.monotonic() - began < 45
        assert "rank 1" in last.error and "hangs" in last.error
    assert_gone(mark)


def test_the_first_cause_is_told_and_not_what_it_did_to_others():
    with pytest.raises(StartError, match=r"rank 1 .*ValueError: model.embed_tokens.weight is miss"):
        with engine_of(fakes.FailingLoader):
            pass
    with engine_of(fakes.FailingStep) as engine:
        ranks = pids(engine)
        engine.add(request("a", 1, max_tokens=100))
        last = collect(engine)[-1]
        assert "rank 1" in last.error and "an illegal address at step 3" in last.error
        deadline = time.monotonic() + 60
        while not all(map(process_gone, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(process_gone, ranks)), "nobody can call a rank that has failed"


def test_a_worker_that_will_not_die_is_killed():
    with engine_of(fakes.WontDie, tp=1) as engine:
        mark, began = mark_of(pids(engine)[0]), time.monotonic()
    assert time.monotonic() - began < 60
    assert_gone(mark, timeout_s=0.1)


def test_what_cannot_be_placed_is_told_with_needs_and_holders(shared_ray):
    with engine_of(tp=2, dp=2):
        with pytest.raises(PlacementError) as error:
            start_ray_engine(resolved_config(tp=3, placement_timeout_seconds=1.0))
        message = str(error.value)
        assert "need 1 x 3 CPU" in message and "have 6 CPU on 1 host(s), 2 free" in message
        assert "held by lockstep-" in message and "replica-1 (2)" in message
    # Six of its seven find a place, and give it back.
    with pytest.raises(PlacementError, match="have 6 CPU on 1 host.s., 6 free; held by no other"):
        start_ray_engine(resolved_config(dp=7, placement_timeout_seconds=1.0))
    await_free(shared_ray, "CPU", 6)
    with pytest.raises(PlacementError, match="need 1 x 4 GPU.*have 2 GPU.*no other placement"):
        start_ray_engine(resolved_config(tp=4, device="cuda", placement_timeout_seconds=1.0))
    await_free(shared_ray, "GPU", 2)


def test_gpu_ranks_get_one_gpu_each_and_see_all_of_them():
    from lockstep.launcher.create_actors import create_scheduler, create_worker
    from lockstep.launcher.reserve import Reservation

    config = resolved_config(tp=2).worker
    reservation = Reservation(config.parallel, owner="test", device="cuda")
    reservation.wait(10.0, fixed_size=True)
    import ray

    workers = [create_worker(config, rank, reservation, "test-gpus", None) for rank in range(2)]
    scheduler = create_scheduler(config, reservation, "test-gpus", None)
    places = [place for place, _ in ray.get([worker.place.remote() for worker in workers])]
    assert sorted(place.gpu_ids for place in places) == [("0",), ("1",)]
    assert [place.visible for place in places] == [None, None]
    assert ray.get(scheduler.process.remote()).pid not in [place.pid for place in places]
    for actor in (*workers, scheduler):
        ray.kill(actor)
    reservation.release()


def _when(path, act):
    from threading import Thread

    def watch():
        deadline = time.monotonic() + 90
        while not path.exists() or not path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        act(int(path.read_text()))

    thread = Thread(target=watch)
    thread.start()
    return thread


def _scheduler(rank_pid):
    """The scheduler's process of the engine that this rank belongs to."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in marked(mark_of(rank_pid))}
    (scheduler,) = [pid for pid, title in titles.items() if "SchedulerActor" in title]
    return scheduler


def _alive(folder):
    written = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(written) == 2
    return [pid for pid in written if not process_gone(pid)]
