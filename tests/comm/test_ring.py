import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, rank_outcomes, run_ranks

from lockstep.comm import ring as ring_module
from lockstep.comm.errors import CommError, CommTimeout, WireError
from lockstep.comm.ring import Ring, RingAddress, RingReader, RingWriter

_context = multiprocessing.get_context("forkserver")


def _reader_main(commands: Connection) -> None:
    """Attach on an address, poll on True, leave on None."""
    reader = None
    while (command := commands.recv()) is not None:
        if command is True:
            commands.send(reader.poll())
            continue
        if reader is not None:
            reader.close()
        reader = RingReader(*command)
        commands.send("attached")


@pytest.fixture(scope="module")
def readers():
    """Two reader processes that obey commands."""
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_reader_main, args=(theirs,), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def _ask(pipe: Connection, command: object) -> object:
    pipe.send(command)
    assert pipe.poll(20), "reader process does not answer"
    return pipe.recv()


class _Model:
    """A ring as a list: what has been written, and how far each reader is."""

    def __init__(self, capacity: int, num_readers: int) -> None:
        self.capacity = capacity
        self.records: list[bytes] = []
        self.read = [0] * num_readers

    def used_by(self, index: int) -> int:
        return sum(-(-(16 + len(data)) // 16) * 16 for data in self.records[self.read[index] :])

    def has_room(self, data: bytes) -> bool:
        size = -(-(16 + len(data)) // 16) * 16
        return all(self.used_by(i) + size <= self.capacity for i in range(len(self.read)))

    def slowest(self) -> int:
        return min(range(len(self.read)), key=lambda i: (-self.used_by(i), i))

    def poll(self, index: int) -> bytes | None:
        if self.read[index] == len(self.records):
            return None
        self.read[index] += 1
        return self.records[self.read[index] - 1]


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 112)),
        st.tuples(st.just("read"), st.integers(0, 1)),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps=_steps, capacity=st.sampled_from([128, 144, 256, 1024]))
def test_ring_behaves_as_a_list(readers: list[Connection], steps, capacity: int) -> None:
    model = _Model(capacity, 2)
    with Ring.create(num_readers=2, capacity_bytes=capacity) as ring:
        for index, pipe in enumerate(readers):
            _ask(pipe, (ring.address, index))
        writer = RingWriter(ring)
        for action, number in steps:
            if action == "read":
                assert _ask(readers[number], True) == model.poll(number)
            else:
                _write_both(writer, model, random.Random(number).randbytes(number))
            assert writer.lag() == {i: len(model.records) - model.read[i] for i in range(2)}
        writer.close()


def _write_both(writer: RingWriter, model: _Model, data: bytes) -> None:
    if model.has_room(data):
        writer.write(data, timeout_s=0)
        model.records.append(data)
    else:
        with pytest.raises(CommTimeout, match=f"reader {model.slowest()} "):
            writer.write(data, timeout_s=0)


def _records(seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(source.choice([0, 1, 30, 500, 3000])) for _ in range(3000)]


def _stream(rank: Rank, address: RingAddress) -> int:
    reader = RingReader(address, rank.rank)
    for number, expected in enumerate(_records(7)):
        assert reader.read(timeout_s=20) == expected, number
        if number % 1000 == 500 * rank.rank:
            time.sleep(0.02)
    return number + 1


def _write_all(rank: Rank, address: RingAddress) -> int:
    if rank.rank == rank.size - 1:
        writer = RingWriter(address)
        for data in _records(7):
            writer.write(data, timeout_s=20)
        return 3000
    return _stream(rank, address)


def test_concurrent_readers_see_all_records_in_order() -> None:
    with Ring.create(num_readers=3, capacity_bytes=8192) as ring:
        assert run_ranks(_write_all, 4, ring.address, gloo=False) == [3000] * 4


def test_address_travels_as_a_message() -> None:
    with Ring.create(num_readers=1, capacity_bytes=64) as ring:
        data = msgspec.msgpack.encode(ring.address)
        assert msgspec.msgpack.decode(data, type=RingAddress) == ring.address


def _attach_and_die(rank: Rank, address: RingAddress) -> None:
    RingReader(address, 1)
    os._exit(3)


def test_dead_reader_is_named_at_once_and_a_sleeping_one_at_the_deadline() -> None:
    with Ring.create(num_readers=2, capacity_bytes=64) as ring:
        reader, writer = RingReader(ring, 0), RingWriter(ring)
        writer.write(b"x" * 40)
        assert reader.poll() == b"x" * 40
        with pytest.raises(CommTimeout, match=r"reader 1 \(never attached, 1 records behind\)"):
            writer.write(b"x" * 40, timeout_s=0.05)
        rank_outcomes(_attach_and_die, 1, ring.address, gloo=False)
        started = time.monotonic()
        with pytest.raises(CommTimeout, match=r"reader 1 \(pid \d+.*its process is gone"):
            writer.write(b"x" * 40, timeout_s=30)
        assert time.monotonic() - started < 5


def _write_two_and(rank: Rank, address: RingAddress, end: str) -> None:
    writer = RingWriter(address)
    writer.write(b"first")
    writer.write(b"second")
    if end == "close":
        writer.close()
    os._exit(0)


@pytest.mark.parametrize("end, message", [("close", "has closed"), ("die", "is gone")])
def test_reader_reads_the_rest_and_then_learns_that_the_writer_ended(end, message) -> None:
    with Ring.create(num_readers=1, capacity_bytes=256) as ring:
        reader = RingReader(ring, 0)
        rank_outcomes(_write_two_and, 1, ring.address, end, gloo=False)
        assert [reader.read(1), reader.read(1)] == [b"first", b"second"]
        started = time.monotonic()
        with pytest.raises(CommError, match=message):
            reader.read(timeout_s=30)
        assert time.monotonic() - started < 5


def _write_and_stay(address: RingAddress) -> None:
    RingWriter(address).write(b"here")
    time.sleep(600)


@pytest.fixture
def stayer():
    """Starts a process that has written one record and stays."""
    started = []

    def start(address: RingAddress):
        process = _context.Process(target=_write_and_stay, args=(address,), daemon=True)
        process.start()
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.join()


def test_reader_learns_that_the_writer_is_stopped(stayer, monkeypatch) -> None:
    monkeypatch.setattr(ring_module, "STOPPED_S", 0.5)
    with Ring.create(num_readers=1, capacity_bytes=256) as ring:
        reader, pid = RingReader(ring, 0), stayer(ring.address)
        assert reader.read(timeout_s=60) == b"here"
        os.kill(pid, signal.SIGSTOP)
        assert reader.read(timeout_s=0.2) is None
        os.kill(pid, signal.SIGCONT)
        assert reader.read(timeout_s=0.8) is None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(CommError, match=rf"pid {pid}\) hangs: stopped for 0.5 s"):
            reader.read(timeout_s=30)


def test_read_gives_none_at_its_deadline_and_idles_cheaply() -> None:
    with Ring.create(num_readers=1, capacity_bytes=64) as ring:
        reader = RingReader(ring, 0)
        writer = RingWriter(ring)
        started, busy = time.monotonic(), time.process_time()
        assert reader.read(timeout_s=1.0) is None
        assert 1.0 <= time.monotonic() - started < 2.0
        assert time.process_time() - busy < 0.05
        writer.write(b"late")
        assert reader.read(timeout_s=0) == b"late"


def test_damage_is_an_error_and_not_a_record() -> None:
    with Ring.create(num_readers=1, capacity_bytes=256) as ring:
        reader, writer = RingReader(ring, 0), RingWriter(ring)
        writer.write(b"payload")
        os.pwrite(ring.address.fd, b"X", 16 * 8 + 16 + 3)
        with pytest.raises(WireError, match="record 0 of the ring is damaged"):
            reader.read(timeout_s=1)


def test_limits_are_named() -> None:
    with pytest.raises(ValueError, match="num_readers must be at least 1, got 0"):
        Ring.create(num_readers=0, capacity_bytes=64)
    with pytest.raises(ValueError, match="capacity_bytes must be at least 32, got 8"):
        Ring.create(num_readers=1, capacity_bytes=8)
    with Ring.create(num_readers=1, capacity_bytes=64) as ring:
        with pytest.raises(ValueError, match="at most 48 bytes, got 49"):
            RingWriter(ring).write(b"x" * 49)
        with pytest.raises(ValueError, match=r"reader index must be in \[0, 1\), got 1"):
            RingReader(ring, 1)
    with pytest.raises(CommError, match="cannot be opened"):
        RingReader(ring, 0)


def test_nothing_is_left_over() -> None:
    before = (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")))
    with Ring.create(num_readers=1, capacity_bytes=1 << 20) as ring:
        reader, writer = RingReader(ring, 0), RingWriter(ring)
        assert set(os.listdir("/dev/shm")) == before[1]
        writer.close()
        reader.close()
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before
