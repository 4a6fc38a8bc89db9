"""Small parts of a start: what an actor's error says, ends of requests, waiting for room, links."""

from types import SimpleNamespace

import pytest
from inline_engine import InlineEngine
from launch_cases import resolved_config
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from lockstep.comm.errors import PeerLost
from lockstep.comm.messages import AddRequest, TokenDelta
from lockstep.comm.sampling import SamplingParams
from lockstep.launcher import reserve
from lockstep.launcher.channels import SchedulerChannels, Seating
from lockstep.launcher.errors import PlacementError
from lockstep.launcher.front_link import Attach, Begin, Leave, Stage, decode_link, encode_link
from lockstep.launcher.host_engine import HostEngine
from lockstep.launcher.in_flight import InFlight
from lockstep.launcher.ray_engine import RayEngine
from lockstep.launcher.ray_member import RayMember, describe
from lockstep.launcher.reserve import Reservation
from lockstep.launcher.supervise import Role, Sign
from lockstep.parallel.config import ParallelConfig

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: WorkerActor
\tpid: 1015
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit
 detail: Worker unexpectedly exits. Some common causes include: (1) the process was killed."""


def died(message):
    error = ActorDiedError()
    error.error_msg = message
    return error


def task_error(cause):
    return RayTaskError("start", "traceback", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "sign", "text"),
    [
        (
            died(DIED),
            Sign.DIED,
            "died: Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits.",
        ),
        (ActorUnavailableError("gone for now", None), Sign.DIED, "cannot be reached: "),
        (
            OutOfMemoryError("Task was killed due to low memory.\nTop 10 users:"),
            Sign.DIED,
            "was ended by Ray: Task was killed due to low memory.",
        ),
        (task_error(ValueError("x is missing")), Sign.RAISED, "failed: ValueError: x is missing"),
        (
            task_error(PeerLost(1, "its process is gone")),
            Sign.SAW_ANOTHER_FAIL,
            "failed: PeerLost: rank 1 is lost: its process is gone",
        ),
    ],
)
def test_what_the_error_of_an_actor_says(error, sign, text):
    failure = describe(error)
    assert failure.sign is sign
    assert failure.text.startswith(text) and "\n" not in failure.text


@pytest.mark.parametrize("error", [died(DIED), OutOfMemoryError("the node ran low on memory")])
def test_an_actor_that_ray_has_ended_is_silent(error, monkeypatch):
    def lose(ref):
        raise error

    monkeypatch.setattr("ray.wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr("ray.get", lose)
    handle = SimpleNamespace(beat=SimpleNamespace(remote=object))
    assert not RayMember(Role.WORKER, "rank 0", handle).heard()


def test_every_request_ends_once_though_the_engine_dies():
    in_flight = InFlight()
    for req_id in ("a", "b", "c"):
        in_flight.add(AddRequest(req_id, b"", SamplingParams()))
    ended = [TokenDelta("a"), TokenDelta("b", finish_reason="stop")]
    assert in_flight.seen(ended) == ended and in_flight.num_errors == 0
    lost = in_flight.end("rank 1 died")
    assert [(each.req_id, each.error) for each in lost] == [
        ("a", "rank 1 died"), ("c", "rank 1 died"),
    ]  # fmt: skip
    assert in_flight.num_errors == 2
    in_flight.add(AddRequest("d", b"", SamplingParams()))
    assert in_flight.end("rank 1 died") == [], "what comes after hears of it by an exception"


def test_an_id_is_refused_as_long_as_its_request_is_in_flight():
    in_flight, request = InFlight(), AddRequest("a", b"", SamplingParams())
    in_flight.add(request)
    in_flight.seen([TokenDelta("a", b"\1\0\0\0")])
    with pytest.raises(ValueError, match="req_id must not be in use, got 'a' twice"):
        in_flight.add(request)
    in_flight.seen([TokenDelta("a", finish_reason="abort")])
    in_flight.add(request)


@pytest.mark.parametrize("engine_class", [InlineEngine, HostEngine, RayEngine])
def test_every_engine_keeps_two_requests_of_one_id_apart(engine_class):
    """The second is refused where it is added and reaches no scheduler."""
    engine, taken = engine_class.__new__(engine_class), []
    add = SimpleNamespace(remote=taken.append) if engine_class is RayEngine else taken.append
    engine._in_flight = InFlight()
    engine._host = engine._scheduler = SimpleNamespace(add=add)
    first, second = (AddRequest("a", ids, SamplingParams()) for ids in (b"1111", b"2222"))
    engine.add(first)
    with pytest.raises(ValueError, match="'a' twice"):
        engine.add(second)
    assert taken == [first]


class SlowGroup:
    """A placement group that finds room at the third look."""

    id = b"o"

    def __init__(self, looks):
        self.looks = looks

    def wait(self, timeout_seconds):
        self.looks -= 1
        return self.looks <= 0


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one host with two GPUs, whose groups take ``looks`` looks."""
    nodes = [{"Alive": True, "Resources": {"GPU": 2.0}}, {"Alive": False, "Resources": {"GPU": 8}}]
    monkeypatch.setattr(reserve, "placement_group", lambda bundles, **_: SlowGroup(3))
    monkeypatch.setattr(reserve.ray, "nodes", lambda: nodes)
    return nodes


def test_hosts_that_join_while_it_waits_are_taken(cluster):
    four = Reservation(ParallelConfig(tp_size=4), owner="o", device="cuda")
    four.wait(5.0, fixed_size=False)


def test_what_no_host_can_hold_is_not_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(Reservation, "_diagnosis", lambda self, timeout_s: "need more")
    Reservation(ParallelConfig(tp_size=2), owner="o", device="cuda").wait(5.0, fixed_size=True)
    for parallel in (ParallelConfig(tp_size=4), ParallelConfig(tp_size=2, dp_size=2)):
        with pytest.raises(PlacementError, match="need more"):
            Reservation(parallel, owner="o", device="cuda").wait(5.0, fixed_size=True)


def test_a_long_wait_for_room_is_told_of_once(cluster, monkeypatch, caplog):
    monkeypatch.setattr(reserve, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(reserve, "placement_group_table", dict)
    monkeypatch.setattr(reserve.ray, "available_resources", lambda: {"GPU": 1.0})
    pairs = Reservation(ParallelConfig(tp_size=2, dp_size=2), owner="o", device="cuda")
    pairs.wait(5.0, fixed_size=False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "need 2 x 2 GPU, each 2 on one host; have 2 GPU on 1 host(s), 1 free" in line
    assert line.endswith("Waiting for up to 5 s.")


@pytest.fixture
def channels(request):
    """Of two replicas of two ranks; the ranks in ``request.param`` are on another host."""
    made = SchedulerChannels(
        resolved_config(tp=2, dp=2).worker, Seating("127.0.0.1", request.param)
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("channels", "kinds"),
    [((), "rrrr"), ((2, 3), "rrpp"), ((1, 2, 3), "rppp")],
    indirect=["channels"],
)
def test_ranks_of_the_schedulers_host_get_rings_and_others_pipes(channels, kinds):
    addresses = channels.addresses()
    found = [type(each.plans).__name__[0].lower() for each in addresses]
    assert "".join(found) == kinds
    assert found == [type(each.results).__name__[0].lower() for each in addresses]
    assert len(channels.plan_writers) == 2 and len(channels.result_readers) == 4


@pytest.mark.parametrize("channels", [(3,)], indirect=True)
def test_links_carry_whole_configurations_as_text(channels):
    config = resolved_config(tp=2).worker
    for message in (
        Begin(config, "cpu"), Leave(), Stage("load", 1, 2), Attach(channels.addresses()),
    ):  # fmt: skip
        assert decode_link(encode_link(message)) == message
