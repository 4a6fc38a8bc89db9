"""A thousand open streams, no request lost, memory flat, no long pause.

LOCKSTEP_SOAK_WAVES sets how many thousands follow each other (2); beside each, a hundred clients
leave early or ask for what cannot be. From 20 on scheduler and rank are actors, else threads.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from byte_model import write_byte_model
from exposed import Exposed
from open_streams import (
    Streamed,
    anonymous_bytes,
    bad_clients,
    longest_pauses,
    own_processes,
    pauses_text,
    scrape,
    start_noop,
    wave,
)
from servers import Server

pytestmark = pytest.mark.timeout(1800)

WAVES = int(os.environ.get("LOCKSTEP_SOAK_WAVES", "2"))
STREAMS, TOKENS, BAD = 1000, 8, 100
LONG = WAVES >= 20
# Thousands until allocators and what Ray keeps of its last calls have their size.
WARM_UP = 5
BYTES_PER_1000 = 1 << 20
PAUSE_S = 0.02


class Soak(NamedTuple):
    waves: list[Streamed]
    memory: dict[str, list[int]]
    told: Exposed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("server")
    server = start_noop("ray" if LONG else "thread", folder, model, streams=STREAMS + BAD)
    try:
        server.await_ready(180)
        yield server
    finally:
        server.clean_up()


def await_rest(server: Server) -> Exposed:
    """Until clients that have left are noticed as well."""
    deadline = time.monotonic() + 60
    while True:
        told = scrape(server)
        ended = told.total("lockstep_request_success_total")
        left = told.one("lockstep_request_accepted_total") - ended
        if told.one("lockstep_num_requests_running") == left == 0:
            return told
        assert time.monotonic() < deadline, f"{left:g} requests are left"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def soak(server: Server) -> Soak:
    pids = own_processes(server)
    waves, memory = [], {name: list[int]() for name in pids}
    for _ in range(WAVES):
        waves.append(wave(server.port, STREAMS, TOKENS))
        asyncio.run(bad_clients(server.port, BAD))
        told = await_rest(server)
        for name, pid in pids.items():
            memory[name].append(anonymous_bytes(pid))
    return Soak(waves, memory, told)


def test_no_request_is_lost(soak: Soak) -> None:
    assert [each.complete for each in soak.waves] == [STREAMS] * WAVES
    assert [each.tokens for each in soak.waves] == [STREAMS * TOKENS] * WAVES


def test_nothing_is_kept_of_requests_that_have_ended(soak: Soak) -> None:
    told = soak.told
    assert told.one("lockstep_kv_blocks_free") == told.one("lockstep_kv_blocks")
    ended = told.total("lockstep_request_success_total")
    assert ended == told.one("lockstep_request_accepted_total") >= WAVES * STREAMS


@pytest.mark.skipif(not LONG, reason="what allocators keep hides what a few thousand requests do")
def test_fault_111_memory_is_flat(soak: Soak) -> None:
    megabytes = {name: [each >> 20 for each in sizes] for name, sizes in soak.memory.items()}
    print(f"MiB after each thousand: {megabytes}")  # noqa: T201
    for sizes in (each[WARM_UP:] for each in soak.memory.values()):
        assert (sizes[-1] - sizes[0]) / (len(sizes) - 1) < BYTES_PER_1000, megabytes


@pytest.mark.skipif(not LONG, reason="threads that share a process prolong each other's pauses")
def test_fault_108_no_collection_stops_the_server(soak: Soak) -> None:
    pauses = longest_pauses(soak.told)
    print(pauses_text(soak.told))  # noqa: T201
    assert 0 < min(pauses.values()) and max(pauses.values()) < PAUSE_S
