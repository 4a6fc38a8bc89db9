"""Ray that cannot be joined or started, or that a signal ends. No Ray is started."""

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import ray

from lockstep.launcher.cli import guarded
from lockstep.launcher.errors import StartError
from lockstep.launcher.guard import MARK
from lockstep.launcher.ray_session import open_session
from lockstep.launcher.termination import Termination


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_answers_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"{prefix}127.0.0.1:{port}")
    with pytest.raises(StartError, match=f"RAY_ADDRESS={prefix}127.0.0.1:{port}: nothing answers"):
        open_session(num_ranks=1, device="cpu")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """RAY_ADDRESS, where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", name)
        yield name


def test_a_wrong_token_is_one_line_with_rays_reason(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    reason = "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: it is incorrect"

    def refuse(**options: Any) -> NoReturn:
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(
            f"Failed to connect to GCS. Last connection error: Traceback:\n  File ...\n{reason}\n"
        )

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(StartError) as refused:
        open_session(num_ranks=1, device="cpu")
    assert str(refused.value) == f"Ray at {address} cannot be joined: {reason}"


TIMED_OUT = "The current node timed out during startup. The GCS may have become overloaded."


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Exception(TIMED_OUT), TIMED_OUT),
        (ValueError("Malformed\n  address port x."), "Malformed address port x."),
        (
            RuntimeError("Failed: Traceback:\n  File ...\nRpcError: no\n"),
            "RpcError: no",
        ),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_ray_that_does_not_come_up_is_one_line_and_exit_code_5(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    terminated: Termination,
    error: Exception,
    reason: str,
) -> None:
    def fail(**options: Any) -> NoReturn:
        raise error

    def start(*arguments: Any) -> NoReturn:
        with pytest.raises(StartError) as refused:
            open_session(num_ranks=1, device="cpu")
        assert refused.value.__cause__ is error
        raise refused.value

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", fail)
    assert guarded(["generate", "hello", "--model", model, "--device", "cpu"], start) == 5
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"lockstep: Ray cannot start on this host: {reason}"


@pytest.mark.parametrize("leaving", [SystemExit(3), KeyboardInterrupt()])
def test_who_leaves_while_ray_starts_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch, leaving: BaseException
) -> None:
    def leave(**options: Any) -> NoReturn:
        raise leaving

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", leave)
    with pytest.raises(type(leaving)) as left:
        open_session(num_ranks=1, device="cpu")
    assert left.value is leaving


def terminate(runtime_env: object) -> NoReturn:
    """Called by Ray on its way up, after it has set its own handler of SIGTERM."""
    signal.raise_signal(signal.SIGTERM)
    raise RuntimeError("Ray goes on, up to here")


@pytest.fixture
def terminated() -> Iterator[Termination]:
    """The command's own handler."""
    handler = Termination()
    before = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, before)


def test_a_sigterm_while_ray_starts_is_for_the_handler_that_was_there(
    monkeypatch: pytest.MonkeyPatch, terminated: Termination
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", f"{__name__}.terminate")
    with pytest.raises(KeyboardInterrupt) as left:
        open_session(num_ranks=1, device="cpu")
    assert "Ray goes on, up to here" in str(left.value.__context__)
    assert terminated.came
    assert signal.getsignal(signal.SIGTERM) is terminated
    assert MARK not in os.environ
