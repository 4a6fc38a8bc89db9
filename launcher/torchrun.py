"""A start without Ray: every process that torchrun (or srun) starts is a rank.

    torchrun --nproc-per-node 2 -m lockstep.launcher.torchrun generate --model ... -tp 2 PROMPT

Rank 0 also starts the front end, which has the command line, the scheduler and the output. The
ranks learn from it, through the store of the rendezvous, what to load and which channels to attach.
A replica stays on one host; replicas may be on several.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec

from lockstep.comm.messages import WorkerReady
from lockstep.launcher.channels import RankChannels, Seating
from lockstep.launcher.errors import EngineDead, LaunchError, StartError
from lockstep.launcher.front_link import (
    AllReady,
    Attach,
    Begin,
    Leave,
    LinkMessage,
    decode_link,
    encode_link,
)
from lockstep.launcher.front_process import FrontProcess
from lockstep.launcher.logs import setup_logging
from lockstep.launcher.network import use_route
from lockstep.launcher.processes import die_with_parent
from lockstep.launcher.rank_env import Seat, read_seat, spec_of_seat
from lockstep.launcher.rank_host import RankHost
from lockstep.launcher.roll import MEET_S, call_roll, seating_of
from lockstep.launcher.siblings import Siblings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# What can take long on another rank: a download first, then the slowest load.
PATIENCE_S = 24 * 3600.0
LEAVE_S = 15.0
BEGIN, READY, ATTACH = (f"lockstep/{name}" for name in ("begin", "ready", "attach"))


def main(argv: Sequence[str] | None = None) -> int:
    """One rank's life; returns its exit code, which on rank 0 is the front end's."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        seat = read_seat(os.environ)
        setup_logging(f"rank {seat.rank}")
        store = meet(seat, agent_serves=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        return lead(seat, store, arguments) if seat.rank == 0 else follow(seat, store)
    except LaunchError as error:
        sys.stderr.write(f"lockstep: {error}\n")
        return error.exit_code
    except Exception as error:
        name = os.environ["RANK"] if "RANK" in os.environ else os.environ["SLURM_PROCID"]
        sys.stderr.write(f"lockstep: rank {name} failed: {type(error).__name__}: {error}\n")
        return StartError.exit_code


def meet(seat: Seat, *, agent_serves: bool) -> "Store":
    """The store at MASTER_ADDR:MASTER_PORT, which torchrun's agent serves, or else rank 0."""
    from lockstep.comm.rendezvous import join_store, serve_store

    if seat.rank != 0 or agent_serves:
        return join_store(seat.master_addr, seat.master_port, MEET_S)
    store, _ = serve_store(seat.master_addr, seat.world_size, MEET_S, port=seat.master_port)
    return store


def lead(seat: Seat, store: "Store", argv: Sequence[str]) -> int:
    """Rank 0: start the front end, pass on what it says, be a rank."""
    front = FrontProcess(argv)
    seating, siblings = _meet_siblings(seat, store)
    try:
        begin = front.hear()
        if not isinstance(begin, Begin):
            return front.exit_code()
        with front.fatal():
            host = _start(seat, store, begin, front, seating)
        attach = front.hear()
        if isinstance(attach, Attach):
            _publish(store, ATTACH, attach)
            # What a rank sees fail the front end sees too; it says who failed, and exits.
            with suppress(Exception), _on_sigterm(lambda number, frame: front.terminate()):
                host.run(attach.channels[0])
                siblings.leave()
        return front.exit_code()
    finally:
        front.kill()
        _leave(seat, store, siblings)


def follow(seat: Seat, store: "Store") -> int:
    """Any other rank: load what rank 0 says, serve until told to stop."""
    _, siblings = _meet_siblings(seat, store)
    begin = _hear(store, BEGIN)
    if isinstance(begin, Begin):
        host = RankHost(begin.worker, store=store)
        ready = host.start(spec_of_seat(seat, begin.worker.parallel, device=begin.device))
        _gather(seat, store, ready)
        attach = _hear(store, ATTACH)
        if isinstance(attach, Attach):
            _serve(host, attach.channels[seat.rank])
    _leave(seat, store, siblings)
    return 0


def _meet_siblings(seat: Seat, store: "Store") -> tuple[Seating, Siblings]:
    roll = call_roll(store, seat)
    seating = seating_of(roll)
    if seating.far:
        use_route(seating.host, os.environ)
    return seating, Siblings(roll, rank=seat.rank)


def _serve(host: RankHost, channels: RankChannels) -> None:
    try:
        # Everybody is sent the signal; rank 0 passes it on, and the front end decides.
        with _on_sigterm(signal.SIG_IGN):
            host.run(channels)
    except Exception as error:
        raise EngineDead(f"{type(error).__name__}: {error}") from error


@contextmanager
def _on_sigterm(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(
    seat: Seat, store: "Store", begin: Begin, front: FrontProcess, seating: Seating
) -> RankHost:
    spec = spec_of_seat(seat, begin.worker.parallel, device=begin.device)
    _publish(store, BEGIN, begin)
    host = RankHost(begin.worker, store=store, on_progress=front.progress)
    front.tell(AllReady(_gather(seat, store, host.start(spec)), seating))
    return host


def _gather(seat: Seat, store: "Store", ready: WorkerReady) -> list[WorkerReady]:
    """Every rank's, in order of rank."""
    from lockstep.comm.rendezvous import exchange

    text = msgspec.json.encode(ready).decode()
    ranks = range(seat.world_size)
    told = exchange(store, READY, text, rank=seat.rank, ranks=ranks, timeout_s=PATIENCE_S)
    return [msgspec.json.decode(told[rank], type=WorkerReady) for rank in ranks]


def _publish(store: "Store", key: str, message: LinkMessage) -> None:
    store.set(key, encode_link(message))


def _hear(store: "Store", key: str) -> LinkMessage:
    store.wait([key], timedelta(seconds=PATIENCE_S))
    return decode_link(store.get(key).decode())


def _leave(seat: Seat, store: "Store", siblings: Siblings) -> None:
    """Go together: rank 0 may serve the store, and those who still wait must hear that it ends."""
    siblings.leave()
    # The store may be gone with the rank or the agent that served it.
    with suppress(RuntimeError):
        if seat.rank == 0:
            _publish(store, BEGIN, Leave())
            _publish(store, ATTACH, Leave())
        siblings.wait_left(store, LEAVE_S)


def _run() -> NoReturn:
    """Exit without interpreter teardown, in which finalisers of groups and devices can block."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A killed agent ends nobody by itself.
        die_with_parent(os.getppid())
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _run()
