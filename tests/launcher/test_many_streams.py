"""A thousand open streams, no request lost, memory flat, no long pause.

LOCKSTEP_SOAK_WAVES sets how many thousands follow each other (3). Of each, a tenth leave early or
ask for what cannot be, beside the thousand.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from byte_model import write_byte_model
from exposed import Exposed
from open_streams import Streamed, anonymous_bytes, bad_clients, scrape, start_noop, wave
from servers import Server

pytestmark = pytest.mark.timeout(1800)

WAVES = int(os.environ.get("LOCKSTEP_SOAK_WAVES", "3"))
STREAMS, TOKENS, BAD = 1000, 8, 100
# What the allocator keeps moves by megabytes, so that few waves can only show large leaks.
BYTES_PER_1000 = (1 << 20) if WAVES >= 20 else (8 << 20)
PAUSE_S = 0.02


class Soak(NamedTuple):
    waves: list[Streamed]
    memory: list[int]
    told: Exposed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("server")
    server = start_noop("thread", folder, model, streams=STREAMS + BAD)
    try:
        server.await_ready()
        yield server
    finally:
        server.clean_up()


def await_rest(server: Server) -> Exposed:
    deadline = time.monotonic() + 20
    while True:
        told = scrape(server)
        if told.one("lockstep_num_requests_running") == server.ask("/load")[1]["server_load"] == 0:
            return told
        assert time.monotonic() < deadline, "requests are left"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def soak(server: Server) -> Soak:
    waves, memory = [], []
    for _ in range(WAVES):
        waves.append(wave(server.port, STREAMS, TOKENS))
        asyncio.run(bad_clients(server.port, BAD))
        told = await_rest(server)
        memory.append(anonymous_bytes(server.root.pid))
    return Soak(waves, memory, told)


def test_no_request_is_lost(soak: Soak) -> None:
    assert [each.complete for each in soak.waves] == [STREAMS] * WAVES
    assert [each.tokens for each in soak.waves] == [STREAMS * TOKENS] * WAVES


def test_fault_111_memory_is_flat_and_nothing_is_kept(soak: Soak) -> None:
    told = soak.told
    assert told.one("lockstep_kv_blocks_free") == told.one("lockstep_kv_blocks")
    ended = told.total("lockstep_request_success_total")
    assert ended == told.one("lockstep_request_accepted_total") >= WAVES * STREAMS
    megabytes = [each >> 20 for each in soak.memory]
    print(f"MiB after each thousand: {megabytes}")  # noqa: T201
    growth = (soak.memory[-1] - soak.memory[0]) / (WAVES - 1)
    assert growth < BYTES_PER_1000, megabytes


def test_fault_108_no_collection_stops_the_server(soak: Soak) -> None:
    for process in ("front_end", "scheduler"):
        (pause,) = soak.told.find("lockstep_gc_longest_pause_seconds", process=process, clock="cpu")
        assert 0 < pause.value < PAUSE_S
