"""What processes are given: Ray's own defaults, an actor's environment, ring sizes."""

import subprocess
import sys

import pytest
from launch_cases import resolved_config
from msgspec import structs

from lockstep.comm.codec import encode
from lockstep.comm.messages import LaneMask, ReplicaPlan
from lockstep.launcher.channels import SchedulerChannels, Seating, ring_bytes
from lockstep.launcher.logs import setup_logging
from lockstep.launcher.ray_environment import set_ray_defaults


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_an_own_cluster_gets_a_token_in_memory_only(home):
    env, other = {}, {}
    set_ray_defaults(env)
    set_ray_defaults(other)
    assert env["RAY_AUTH_MODE"] == "token" and len(env["RAY_AUTH_TOKEN"]) == 64
    assert env["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert list(home.iterdir()) == []


def test_a_cluster_that_is_joined_gets_the_token_that_there_is(home):
    without = {"RAY_ADDRESS": "10.0.0.1:6379"}
    set_ray_defaults(without)
    assert without["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in without
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("t")
    with_file = {"RAY_ADDRESS": "10.0.0.1:6379"}
    set_ray_defaults(with_file)
    assert with_file["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in with_file


def test_what_the_user_has_said_stays(home):
    said = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "1"}
    env = dict(said)
    set_ray_defaults(env)
    assert said.items() <= env.items() and "RAY_AUTH_TOKEN" not in env


@pytest.mark.parametrize(("dp", "lockstep", "groups"), [(1, "auto", 1), (2, "auto", 2)])
def test_each_rank_gets_its_reader_and_its_own_result_ring(dp, lockstep, groups):
    channels = SchedulerChannels(resolved_config(tp=2, dp=dp).worker, Seating())
    addresses = channels.addresses()
    assert len(channels.plan_writers) == groups and len(addresses) == 2 * dp
    assert [own.reader_index for own in addresses] == [0, 1] * dp
    assert len({own.results for own in addresses}) == 2 * dp
    channels.close()


def test_ring_holds_several_of_the_largest_plans():
    config = resolved_config().worker
    plan_bytes, _ = ring_bytes(config)
    assert plan_bytes > 4 * 4 * config.schedule.max_num_batched_tokens
    model = structs.replace(config.model, vocab_size=10_000_000)
    plan_bytes, _ = ring_bytes(structs.replace(config, model=model))
    lanes = range(config.schedule.max_num_seqs)
    masks = [LaneMask(lane, bytes(10_000_000 // 8)) for lane in lanes]
    assert plan_bytes > 4 * len(encode(ReplicaPlan(len(lanes), masks=masks)))


def test_the_scheduler_process_needs_neither_torch_nor_ray():
    code = "import sys, lockstep.launcher.scheduler_host as h; h.real_driver; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "ray"} & set(done.stdout.split())


def test_actors_import_no_torch():
    code = "import sys, lockstep.launcher.actors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_unknown_log_level_is_refused():
    with pytest.raises(ValueError, match="LOCKSTEP_LOG_LEVEL must be one of .* got 'LOUD'"):
        setup_logging("x", level="loud")
