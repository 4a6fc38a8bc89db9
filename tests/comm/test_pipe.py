"""Pipes between processes: order, ends, strangers; and both kinds of channel behind one writer."""

import multiprocessing
import os
import signal
import socket
import time
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from lockstep.comm.channel import ChannelAddress, FanOut, open_reader, open_writer
from lockstep.comm.errors import CommError, CommTimeout
from lockstep.comm.pipe import PipeAddress, PipeHub, PipeReader, PipeWriter
from lockstep.comm.ring import Ring, RingWriter

RECORDS = [bytes([n % 251]) * (1 + n * 37 % 5000) for n in range(500)]
_context = multiprocessing.get_context("forkserver")


@pytest.fixture
def hub():
    with PipeHub("127.0.0.1") as hub:
        yield hub


@contextmanager
def other(act, *args):
    process = _context.Process(target=act, args=args, daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()


def echo(plans: ChannelAddress, results: ChannelAddress) -> None:
    reader, writer = open_reader(plans, 0), open_writer(results)
    while (data := reader.read(20)) is not None:
        writer.write(data)


def read_slowly(plans: PipeAddress, results: PipeAddress) -> None:
    reader, writer = PipeReader.connect(plans), PipeWriter.connect(results)
    while (data := reader.read(20)) != b"stop":
        time.sleep(0.01)
        writer.write(data)
    reader.close()
    writer.close()


def write_two(address: PipeAddress, then: str) -> None:
    writer = PipeWriter.connect(address)
    writer.write(b"first")
    writer.write(b"second")
    if then == "close":
        writer.close()
    time.sleep(20)


def test_records_arrive_whole_and_in_order_both_ways(hub):
    plans, results = hub.writer(), hub.reader()
    with other(echo, plans.address, results.address):
        for data in RECORDS:
            plans.write(data)
        assert [results.read(20) for _ in RECORDS] == RECORDS
        assert results.poll() is None
    plans.close()
    results.close()


def test_what_was_written_before_a_close_is_read_by_a_slow_reader(hub):
    plans, results = hub.writer(), hub.reader()
    with other(read_slowly, plans.address, results.address) as process:
        for data in [*RECORDS[:30], b"stop"]:
            plans.write(data)
        plans.close()
        assert [results.read(20) for _ in RECORDS[:30]] == RECORDS[:30]
        results.close()
        process.join(10)
        assert process.exitcode == 0


@pytest.mark.parametrize("then", ["close", "be killed"])
def test_reader_reads_the_rest_and_then_learns_that_the_writer_ended(hub, then):
    reader = hub.reader()
    with other(write_two, reader.address, then) as process:
        assert [reader.read(20), reader.read(20)] == [b"first", b"second"]
        if then == "be killed":
            process.kill()
        began = time.monotonic()
        with pytest.raises(CommError, match="has closed the pipe or is gone"):
            reader.read(20)
        with pytest.raises(CommError, match="is gone"):
            reader.read(0)
        assert time.monotonic() - began < 3
    reader.close()


def test_a_stopped_process_is_taken_for_gone_by_its_silence(hub, monkeypatch):
    monkeypatch.setattr("lockstep.comm.pipe._HEARTBEAT_MS", 200)
    monkeypatch.setattr("lockstep.comm.pipe._SILENCE_MS", 1000)
    reader = hub.reader()
    with other(write_two, reader.address, "stop") as process:
        assert [reader.read(20), reader.read(20)] == [b"first", b"second"]
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(CommError, match="is gone"):
            reader.read(20)
        assert 0.5 < time.monotonic() - began < 5
    reader.close()


def test_writer_names_a_reader_that_never_came_and_one_that_is_gone(hub):
    plans, results = hub.writer(), hub.reader()
    with pytest.raises(CommTimeout, match=r"tcp://127.0.0.1:\d+ did not attach for 0.05 s"):
        plans.write(b"x", timeout_s=0.05)
    with other(echo, plans.address, results.address) as process:
        plans.write(b"x")
        assert results.read(20) == b"x"
        process.kill()
        process.join()
        began = time.monotonic()
        with pytest.raises(CommTimeout, match="is gone"):
            while time.monotonic() - began < 20:
                plans.write(b"x", timeout_s=20)
        assert time.monotonic() - began < 3
    plans.close()
    results.close()


def test_nobody_without_the_key_is_heard_or_disturbs(hub):
    plans, results = hub.writer(), hub.reader()
    port = int(results.address.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as http:
        http.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    wrong, _ = zmq.curve_keypair()
    stranger = PipeWriter.connect(PipeAddress(results.address.endpoint, wrong))
    with pytest.raises(CommTimeout):
        stranger.write(b"evil", timeout_s=0.5)
    stranger.close()
    assert results.read(0.1) is None
    with other(echo, plans.address, results.address):
        plans.write(b"good")
        assert results.read(20) == b"good"
    plans.close()
    results.close()


def test_one_writer_reaches_a_ring_and_a_pipe(hub):
    results = [hub.reader(), hub.reader()]
    pipe = hub.writer()
    with Ring.create(num_readers=1, capacity_bytes=1 << 16) as ring:
        plans = FanOut([RingWriter(ring), pipe])
        with other(echo, ring.address, results[0].address):
            with other(echo, pipe.address, results[1].address):
                for data in RECORDS[:50]:
                    plans.write(data, 20)
                for reader in results:
                    assert [reader.read(20) for _ in RECORDS[:50]] == RECORDS[:50]
        plans.close()
    for reader in results:
        reader.close()


def test_addresses_travel_and_an_interface_that_is_not_there_is_named(hub):
    with Ring.create(num_readers=1, capacity_bytes=64) as ring:
        reader = hub.reader()
        for address in (ring.address, reader.address):
            data = msgspec.json.encode(address)
            assert msgspec.json.decode(data, type=ChannelAddress) == address
        reader.close()
    with PipeHub("192.0.2.77") as nowhere:
        with pytest.raises(CommError, match="no pipe can be bound on 192.0.2.77"):
            nowhere.reader()


def test_reading_nothing_waits_until_the_deadline_and_costs_little(hub):
    reader = hub.reader()
    began, busy = time.monotonic(), time.process_time()
    assert reader.read(1.0) is None
    assert 1.0 <= time.monotonic() - began < 2.0
    assert time.process_time() - busy < 0.05
    reader.close()
