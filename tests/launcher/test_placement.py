"""Where ranks are put: Ray's ids, torchrun's and Slurm's variables, each with its errors."""

import pytest

from lockstep.launcher.actors import own_environment
from lockstep.launcher.channels import Seating
from lockstep.launcher.errors import ConfigError, PlacementError
from lockstep.launcher.placement import Place, device_index, seating_of, specs_from_places
from lockstep.launcher.rank_env import (
    foreign_variables,
    read_seat,
    spec_of_seat,
    torchrun_env_from_slurm,
)
from lockstep.parallel.config import ParallelConfig

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "GPU-0a1b2c3d-0000-4106-c12f-20bd9faed9f6"
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
TP2_DP2 = ParallelConfig(tp_size=2, dp_size=2)


@pytest.mark.parametrize(
    ("gpu_id", "visible", "index"),
    [
        ("0", None, 0),
        ("3", None, 3),
        ("2", "2,3", 0),
        ("3", "2,3", 1),
        ("3", "3", 0),
        ("3", "3,2", 0),
        ("1", " 0 , 1 ", 1),
        (UUID, f"{OTHER},{UUID}", 1),
        (UUID, f"{OTHER},GPU-8932f937", 1),
        (UUID, UUID, 0),
    ],
)
def test_device_index_is_the_position_among_visible_devices(gpu_id, visible, index):
    assert device_index(gpu_id, visible) == index


@pytest.mark.parametrize(
    ("gpu_id", "visible", "named"),
    [("0", "2,3", "'2,3'"), ("1", "", "''"), (UUID, None, UUID), ("1", "10,11", "'10,11'")],
)
def test_device_index_refuses_what_is_not_visible(gpu_id, visible, named):
    with pytest.raises(PlacementError, match="Ray assigned GPU") as error:
        device_index(gpu_id, visible)
    assert named in str(error.value)


def spec_from_env(env, parallel, *, device):
    return spec_of_seat(read_seat(env), parallel, device=device)


def place(rank, gpu_ids=(), visible=None, node="a", boot="kernel"):
    return Place(
        node_id=node, address=f"10.0.0.{ord(node)}", host=f"host-{node}", pid=100 + rank,
        boot_id=boot, gpu_ids=gpu_ids, visible=visible,
    )  # fmt: skip


def test_two_groups_on_one_host_get_disjoint_devices():
    places = [place(rank, (str(rank + 4),), "4,5,6,7") for rank in range(4)]
    specs = specs_from_places(places, TP2_DP2, device="cuda", port=5)
    assert [spec.device for spec in specs] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [(spec.dp_rank, spec.tp_rank) for spec in specs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(spec.master_addr, spec.master_port) for spec in specs} == {("127.0.0.1", 5)}
    assert [(spec.local_rank, spec.ranks_on_host) for spec in specs] == [(i, 4) for i in range(4)]
    assert seating_of(places) == Seating("127.0.0.1", ())


def test_replicas_on_two_hosts_count_their_ranks_and_devices_anew_and_meet_at_rank_0():
    places = [place(rank, (str(rank % 2),), node="ab"[rank // 2]) for rank in range(4)]
    specs = specs_from_places(places, TP2_DP2, device="cuda", port=5)
    assert [spec.device for spec in specs] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert [(spec.node_rank, spec.local_rank) for spec in specs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {spec.ranks_on_host for spec in specs} == {2}
    assert {spec.master_addr for spec in specs} == {"10.0.0.97"}
    assert seating_of(places) == Seating("10.0.0.97", (2, 3))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([place(0, ("1",)), place(1, ("1",))], "ranks 0 and 1 were both given cuda:1"),
        ([place(0, ("0",)), place(1, ())], "exactly 1 GPU, Ray gave process 101"),
        ([place(0, ("0",)), place(1, ("0",), node="b")], "tp_rank 1 on host-b"),
        ([place(0, ("0",)), place(1, ("1",), boot="other")], "replica must be on one host"),
    ],
)
def test_places_that_cannot_work_are_refused(places, message):
    with pytest.raises(PlacementError, match=message):
        specs_from_places(places, ParallelConfig(tp_size=2), device="cuda", port=5)


def test_torchrun_variables_become_a_rank():
    spec = spec_from_env(TORCHRUN, TP2_DP2, device="cuda")
    assert (spec.global_rank, spec.dp_rank, spec.tp_rank, spec.device) == (3, 1, 1, "cuda:3")
    assert (spec.master_addr, spec.master_port) == ("127.0.0.1", 29500)
    assert spec_from_env(TORCHRUN, TP2_DP2, device="cpu").device == "cpu"


def test_every_missing_variable_is_named():
    env = {name: value for name, value in TORCHRUN.items() if name not in ("RANK", "MASTER_PORT")}
    with pytest.raises(ConfigError, match="RANK, MASTER_PORT; start this with torchrun"):
        spec_from_env(env, TP2_DP2, device="cpu")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", r"RANK must be an integer in \[0, 4\), got '4'"),
        ("RANK", "x", "RANK must be an integer .* got 'x'"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK must be"),
        ("MASTER_PORT", "0", r"MASTER_PORT must be an integer in \[1, 65536\)"),
        ("WORLD_SIZE", "8", "WORLD_SIZE is 8, but .* needs 4 ranks"),
        ("LOCAL_WORLD_SIZE", "1", r"LOCAL_RANK must be an integer in \[0, 1\), got '3'"),
        ("LOCAL_WORLD_SIZE", "5", r"LOCAL_WORLD_SIZE must be an integer in \[1, 5\), got '5'"),
        ("GROUP_RANK", "x", "GROUP_RANK must be an integer .* got 'x'"),
    ],
)
def test_bad_variables_are_named_with_their_limit(name, value, message):
    with pytest.raises(ConfigError, match=message):
        spec_from_env(TORCHRUN | {name: value}, TP2_DP2, device="cpu")


def test_a_replica_of_torchrun_stays_on_one_host():
    second = TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    spec = spec_from_env(second, TP2_DP2, device="cuda")
    assert (spec.device, spec.dp_rank, spec.tp_rank) == ("cuda:1", 1, 1)
    assert (spec.node_rank, spec.ranks_on_host) == (1, 2)
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE 2 is no multiple of .* 4"):
        spec_from_env(second, ParallelConfig(tp_size=4), device="cuda")


SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "777"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu-3", "gpu-3"),
        ("a1,b2", "a1"),
        ("n[3]", "n3"),
        ("rack2-n[010-012]", "rack2-n010"),
    ],
)
def test_slurm_master_is_the_first_host(nodes, first):
    env = torchrun_env_from_slurm(SLURM | {"SLURM_JOB_NODELIST": nodes})
    assert env["MASTER_ADDR"] == first


def test_slurm_ranks_agree_on_a_port_and_steps_differ():
    ports = {
        torchrun_env_from_slurm(SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})[
            "MASTER_PORT"
        ]
        for rank in range(4)
    }
    other = torchrun_env_from_slurm(SLURM | {"SLURM_STEP_ID": "1"})["MASTER_PORT"]
    assert len(ports) == 1 and other not in ports


def test_slurm_process_becomes_a_rank_and_torchrun_wins_inside_srun():
    spec = spec_from_env(SLURM, TP2_DP2, device="cuda")
    assert (spec.global_rank, spec.device, spec.master_addr) == (1, "cuda:1", "127.0.0.1")
    assert spec_from_env(SLURM | TORCHRUN, TP2_DP2, device="cpu").global_rank == 3


def test_slurm_over_two_hosts_gives_each_its_replica():
    second = SLURM | {"SLURM_PROCID": "3", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    spec = spec_from_env(second, TP2_DP2, device="cuda")
    assert (spec.device, spec.dp_rank, spec.node_rank) == ("cuda:1", 1, 1)
    one_step = second | {"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}
    assert spec_from_env(one_step, TP2_DP2, device="cuda") == spec


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_NNODES", "3", "as many tasks, but SLURM_NTASKS is 4 on 3 nodes"),
        ("SLURM_NNODES", "0", r"SLURM_NNODES must be an integer in \[1, 5\)"),
        ("SLURM_LOCALID", "0", "--distribution=block.*SLURM_PROCID 1 of 4 .*SLURM_LOCALID 0"),
        ("SLURM_NTASKS", "x", "SLURM_NTASKS must be an integer"),
    ],
)
def test_slurm_tasks_that_cannot_be_ranks_are_refused(name, value, message):
    with pytest.raises(ConfigError, match=message):
        spec_from_env(SLURM | {name: value}, TP2_DP2, device="cpu")


def test_a_rank_owns_its_environment():
    env = {"RANK": "7", "SLURM_PROCID": "7", "MASTER_ADDR": "10.255.255.1", "HOME": "/root"}
    assert set(foreign_variables(env)) == {"RANK", "SLURM_PROCID", "MASTER_ADDR"}
    spec = spec_from_env(TORCHRUN, TP2_DP2, device="cpu")
    own_environment(spec, env)
    assert "SLURM_PROCID" not in env and env["HOME"] == "/root"
    assert (env["RANK"], env["MASTER_ADDR"], env["WORLD_SIZE"]) == ("3", "127.0.0.1", "4")
