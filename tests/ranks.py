"""Real processes for tests of ranks: ``run_ranks`` for results, ``rank_outcomes`` for deaths.

The test process binds a TCPStore on port 0 and starts one process a rank. They come from a fork
server that has imported torch and the groups: a rank is a fresh process, without the two seconds
that importing costs.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_HOST = "127.0.0.1"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "lockstep.parallel.topology"])


@dataclass(frozen=True)
class Rank:
    """What ``fn`` gets first: its rank, the number of ranks, and where the store listens.

    The default process group (gloo over that store) is up while ``fn`` runs, unless ``gloo`` is
    False. ``join`` makes a Topology instead.
    """

    rank: int
    size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: a value, an error with its traceback, or (neither) an exit code."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None


class RankDied(RuntimeError):
    """A rank's process ended before it gave a result."""


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60, gloo: bool = True
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``size`` ranks and return the results in rank order.

    ``fn`` must be importable (a top-level function of the test file). The first error, in order
    of arrival, is raised here with its rank and traceback as a note; the other ranks are killed.
    ``gloo`` False leaves ``torch.distributed`` uninitialised.
    """
    outcomes = _run(fn, size, args, timeout_s, gloo, stop_at_error=True)
    return [outcome.value for outcome in outcomes]


def join(
    rank: Rank, *, device: str = "cpu", all_reduce: str = "auto", epoch: int = 0, **sizes: Any
) -> Any:
    """The Topology of this rank; ``sizes`` are fields of ParallelConfig, tp_size all by default.

    Who joins again needs another ``epoch``.
    """
    import torch
    from torch import distributed

    from lockstep.comm.rendezvous import join_store
    from lockstep.parallel import mesh
    from lockstep.parallel.config import ParallelConfig
    from lockstep.parallel.rank_spec import RankSpec
    from lockstep.parallel.topology import Topology

    if distributed.is_initialized():
        distributed.destroy_process_group()
    torch.set_num_threads(1)
    config = ParallelConfig(**({"tp_size": rank.size, "timeout_s": 20.0} | sizes))
    dp_rank, tp_rank = mesh.coordinates(rank.rank, config)
    spec = RankSpec(
        global_rank=rank.rank, world_size=rank.size, dp_rank=dp_rank, tp_rank=tp_rank,
        device=f"cuda:{rank.rank}" if device == "cuda" else device, epoch=epoch,
    )  # fmt: skip
    store = join_store(rank.master_addr, rank.master_port, config.timeout_s)
    return Topology.create(spec, config, store=store, all_reduce=all_reduce)


def num_gpus() -> int:
    """How many ranks a test over GPUs has: all that there are. On fewer than two it is skipped."""
    import torch

    return max(2, torch.cuda.device_count())


def rank_outcomes(
    fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60, gloo: bool = True
) -> list[Outcome]:
    """Like ``run_ranks``, but every rank may fail or die and how each ended is returned."""
    return _run(fn, size, args, timeout_s, gloo, stop_at_error=False)


def _run(
    fn: Callable[..., Any], size: int, args: tuple[Any, ...], timeout_s: float, gloo: bool, *,
    stop_at_error: bool,
) -> list[Outcome]:  # fmt: skip
    from torch.distributed import TCPStore

    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        pipes: dict[Connection, int] = {}
        processes = []
        for number in range(size):
            rank = Rank(number, size, _HOST, store.port)
            process, pipe = stack.enter_context(_started(fn, rank, args, timeout_s, gloo))
            processes.append(process)
            pipes[pipe] = number
        outcomes = _collect(pipes, processes, time.monotonic() + timeout_s, stop_at_error)
    return [outcomes[number] for number in range(size)]


@contextmanager
def _started(
    fn: Callable[..., Any], rank: Rank, args: tuple[Any, ...], timeout_s: float, gloo: bool
):
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(
        target=_rank_main,
        args=(sender, fn, rank, args, timeout_s, gloo, dict(os.environ)),
        name=f"rank {rank.rank}",
    )
    process.start()
    sender.close()
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join()
        receiver.close()


def _collect(
    pipes: dict[Connection, int], processes: list[Any], deadline: float, stop_at_error: bool
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(pipes):
        open_pipes = [pipe for pipe, number in pipes.items() if number not in outcomes]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _fail_late([pipes[pipe] for pipe in open_pipes], processes)
        for pipe in ready:
            number = pipes[pipe]
            outcomes[number] = _receive(pipe, processes[number])
            if stop_at_error and not outcomes[number].ok:
                _raise(number, outcomes[number])
    return outcomes


def _receive(pipe: Connection, process: Any) -> Outcome:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return Outcome(exit_code=process.exitcode)


def _raise(number: int, outcome: Outcome) -> None:
    if outcome.error is None:
        raise RankDied(f"rank {number} exited with code {outcome.exit_code} and no result")
    outcome.error.add_note(f"raised on rank {number}:\n{outcome.traceback}")
    raise outcome.error


def _fail_late(numbers: list[int], processes: list[Any]) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(processes[number].pid, signal.SIGUSR1)
    time.sleep(0.5)
    raise TimeoutError(f"ranks {numbers} gave no result in time; their stacks are on stderr")


def _rank_main(
    pipe: Connection, fn: Callable[..., Any], rank: Rank, args: tuple[Any, ...],
    timeout_s: float, gloo: bool, environment: dict[str, str],
) -> None:  # fmt: skip
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        if gloo:
            _init_gloo(rank, timeout_s)
        outcome = Outcome(value=fn(rank, *args))
    except Exception as error:
        outcome = Outcome(error=_picklable(error), traceback=traceback.format_exc())
    pipe.send(outcome)
    pipe.close()
    sys.stdout.flush()
    # Threads of a failed group may wait for peers for ever: leave without joining them.
    os._exit(0)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)


def _init_gloo(rank: Rank, timeout_s: float) -> None:
    from datetime import timedelta

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.TCPStore(rank.master_addr, rank.master_port, is_master=False)
    distributed.init_process_group(
        "gloo", store=store, rank=rank.rank, world_size=rank.size,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


def _picklable(error: Exception) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if type(copy) is type(error) else RuntimeError(str(error))
