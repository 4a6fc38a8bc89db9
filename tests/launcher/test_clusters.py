"""Replicas on several nodes of a Ray cluster. The nodes are on this machine and differ by id."""

import os
import time
from functools import partial
from pathlib import Path

import launch_fakes as fakes
import pytest
from launch_cases import resolved_config
from launched import answers, generate_arguments, run_here, tokens_of_one_rank_alone

from lockstep.comm.messages import AddRequest, pack_ids
from lockstep.comm.process import process_gone
from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.cluster import start_ray_engine
from lockstep.launcher.errors import EngineDead, PlacementError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
QUICK = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with two CPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    package = Path(fakes.__file__).parents[2] / "deploy" / "package"
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(package), str(Path(fakes.__file__).parent)]))
    cluster = Cluster()
    cluster.add_node(**NODE, _system_config=QUICK)
    cluster.second = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


def test_replicas_on_two_nodes_give_the_tokens_of_one_rank_alone(tmp_path, cluster):
    folder = tmp_path / "ray"
    folder.mkdir()
    arguments = [*generate_arguments(folder, max_tokens=8, tp=2), "-dp", "2"]
    run_here(arguments, partial(start_ray_engine, worker_type=fakes.RealWithChannels))
    assert answers(folder) == tokens_of_one_rank_alone(tmp_path)
    kinds = [(folder / f"rank{rank}.channels").read_text() for rank in range(4)]
    assert kinds == ["RingReader RingWriter"] * 2 + ["PipeReader PipeWriter"] * 2


def test_a_replica_larger_than_any_node_is_told_with_what_the_nodes_have(cluster):
    began = time.monotonic()
    with pytest.raises(PlacementError) as error:
        start_ray_engine(resolved_config(tp=3, placement_timeout_seconds=1.0))
    assert time.monotonic() - began < 45
    message = str(error.value)
    assert "need 1 x 3 CPU, each 3 on one host" in message
    assert "have 4 CPU on 2 host(s) with 2, 2" in message


def ranks_on(node, pids):
    """Ranks of a node: their processes are children of its raylet."""
    (raylet,) = node.all_processes["raylet"]
    parents = [int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids]
    return [rank for rank, parent in enumerate(parents) if parent == raylet.process.pid]


def test_a_lost_node_ends_the_engine_and_what_was_there_is_named(cluster):
    engine = start_ray_engine(
        resolved_config(tp=2, dp=2), worker_type=fakes.FakeWorker, make_driver=fakes.FakeDriver
    )
    try:
        pids = [rank.pid for rank in engine.summary().ready]
        lost = [f"rank {rank} " for rank in ranks_on(cluster.second, pids)]
        assert len(lost) == 2
        # Ray chooses the node of each replica; the scheduler is with rank 0.
        lost += ["the scheduler"] if "rank 0 " in lost else []
        engine.add(AddRequest("a", pack_ids([1]), SamplingParams(max_tokens=10**6)))
        assert engine.poll(20.0)
        cluster.remove_node(cluster.second, allow_graceful=False)
        began = time.monotonic()
        with pytest.raises(EngineDead) as error:
            while time.monotonic() - began < 60:
                engine.poll(0.5)
        assert str(error.value).startswith(tuple(lost))
        assert time.monotonic() - began < 45
    finally:
        engine.shutdown()
    assert all(map(process_gone, pids))
