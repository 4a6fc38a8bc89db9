"""Memory of a server over many short requests. Only ``make soak`` runs it: it takes minutes."""

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import pytest
from byte_model import write_byte_model
from servers import Server, start_on_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif("LOCKSTEP_SOAK_ROUNDS" not in os.environ, reason="only in make soak"),
]

WORKERS = 8
THOUSANDS = 20
PAGE = os.sysconf("SC_PAGE_SIZE")
# Ours, and not those of Ray.
NAMES = ("serve", "SchedulerActor", "WorkerActor")


def resident_mb(server: Server) -> dict[str, float]:
    found = {}
    for pid, (line, _) in server.processes().items():
        for name in NAMES:
            if f" {name} " in f" {line} " or f"::{name}" in line:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                found[name] = pages * PAGE / 2**20
    return found


def request_of(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def ask_many(port: int, count: int, rng: random.Random) -> list[int]:
    """Statuses of calls on one connection; one in ten is made on another one and dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses = []
    for _ in range(count):
        prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 30)))
        call = {"prompt": prompt, "max_tokens": 2, "logprobs": rng.choice((None, 3))}
        kind = rng.random()
        if kind < 0.1:
            _, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(request_of(call | {"max_tokens": 300}))
            await other.drain()
            await asyncio.sleep(0.001)
            other.close()
        elif kind < 0.15:
            call["temperature"] = -1
        writer.write(request_of(call))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        await reader.readexactly(length)
        statuses.append(int(head.split()[1]))
    writer.close()
    return statuses


def test_fault_111_memory_stays_flat_over_twenty_thousand_requests(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    server = start_on_ray(tmp_path_factory.mktemp("server"), model)

    async def a_thousand(number: int) -> None:
        rngs = [random.Random(100 * number + worker) for worker in range(WORKERS)]
        asked = [ask_many(server.port, 1000 // WORKERS, rng) for rng in rngs]
        statuses = sum(await asyncio.gather(*asked), [])
        assert set(statuses) == {200, 400}

    try:
        server.await_ready(180)
        sizes = []
        for number in range(THOUSANDS):
            asyncio.run(a_thousand(number))
            sizes.append(resident_mb(server))
        warm = THOUSANDS // 4
        growth = {n: (sizes[-1][n] - sizes[warm][n]) / (THOUSANDS - 1 - warm) for n in NAMES}
        told = ", ".join(f"{name} {mb:.2f}" for name, mb in growth.items())
        sys.stdout.write(f"MB per 1,000 requests: {told}\n")
        assert max(growth.values()) < 1.0, sizes
    finally:
        server.clean_up()
