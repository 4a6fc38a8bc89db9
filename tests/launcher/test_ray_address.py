"""An address at which no cluster is."""

import socket

import pytest

from lockstep.launcher.errors import LaunchError
from lockstep.launcher.ray_session import open_session


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_answers_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"{prefix}127.0.0.1:{port}")
    with pytest.raises(LaunchError, match=f"RAY_ADDRESS={prefix}127.0.0.1:{port}: nothing answers"):
        open_session(num_ranks=1, device="cpu")
