import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from lockstep.comm.errors import CommError, CommTimeout
from lockstep.comm.rendezvous import exchange, join_store, preflight_shared_memory, serve_store


def test_port_is_bound_by_its_owner_and_reachable() -> None:
    first, first_port = serve_store("127.0.0.1", 2, timeout_s=5)
    second, second_port = serve_store("127.0.0.1", 2, timeout_s=5)
    assert first_port != second_port and first_port > 0
    join_store("127.0.0.1", first_port, timeout_s=5).set("key", "value")
    assert first.get("key") == b"value" and not second.check(["key"])


@pytest.fixture
def greedy_neighbour(monkeypatch) -> Iterator[None]:
    """Whoever gives up a port that it has bound finds it taken."""
    taken: list[socket.socket] = []
    plain = socket.socket

    class Socket(plain):
        def close(self) -> None:
            address = self.getsockname() if self.fileno() >= 0 else ("", 0)
            super().close()
            if address[1]:
                taken.append(plain())
                taken[-1].bind(address)
                taken[-1].listen()

    monkeypatch.setattr(socket, "socket", Socket)
    yield
    for each in taken:
        each.close()


def _meet(number: int) -> bool:
    """An engine of two ranks: the first binds and publishes, the second joins."""
    store, port = serve_store("127.0.0.1", 2, timeout_s=10)
    peer = join_store("127.0.0.1", port, timeout_s=10)
    peer.set("from", str(number))
    return store.get("from") == str(number).encode()


def test_engines_that_start_at_once_lose_no_port_to_each_other_or_to_others(
    greedy_neighbour,
) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(_meet, range(16)))


def test_exchange_gives_all_values_or_names_who_is_missing() -> None:
    store, port = serve_store("127.0.0.1", 2, timeout_s=5)
    peer = join_store("127.0.0.1", port, timeout_s=5)
    peer.set("hello/1", "one")
    found = exchange(store, "hello", "zero", rank=0, ranks=range(2), timeout_s=5)
    assert found == {0: "zero", 1: "one"}
    started = time.monotonic()
    with pytest.raises(CommTimeout, match=r"hello: ranks \[2, 3\] did not show up within 0.3 s"):
        exchange(store, "hello", "zero", rank=0, ranks=range(4), timeout_s=0.3)
    assert time.monotonic() - started < 5


def test_address_without_a_store_is_named() -> None:
    port = serve_store("127.0.0.1", 1, timeout_s=1)[1]
    with pytest.raises(CommTimeout, match=f"no store answers at 127.0.0.1:{port} within 1 s"):
        join_store("127.0.0.1", port, timeout_s=1)


def test_small_shared_memory_is_refused_with_numbers_and_the_flag(monkeypatch) -> None:
    stats = SimpleNamespace(f_bavail=16, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: stats)
    preflight_shared_memory(16 << 20)
    with pytest.raises(CommError, match="16 MiB free and 17 MiB are needed.*--shm-size"):
        preflight_shared_memory((16 << 20) + 1)
