"""Processes of this host: which one is meant, whether it is gone, ending it for certain."""

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from lockstep.comm.process import process_gone, process_stopped

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


# Producer: any process, about itself. Consumer: whoever must end it or see it die.
class ProcessId(msgspec.Struct, frozen=True):
    """A pid and the time it started (clock ticks since boot), so that a reused pid is no match."""

    pid: int
    started: int

    @property
    def gone(self) -> bool:
        return process_gone(self.pid) or _started(self.pid) != self.started

    @property
    def stopped(self) -> bool:
        return process_stopped(self.pid) and not self.gone

    def kill(self) -> None:
        """SIGKILL it, unless the pid has become someone else's."""
        if not self.gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), _started(os.getpid()))


def boot_id() -> str:
    """The same in all processes that share this kernel and see each other's pids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def end_processes(processes: Iterable[ProcessId], *, timeout_s: float) -> list[ProcessId]:
    """SIGKILL all and wait until they are gone; returns those that are not after ``timeout_s``."""
    left = list(processes)
    for process in left:
        process.kill()
    return wait_gone(left, timeout_s=timeout_s)


def wait_gone(processes: Iterable[ProcessId], *, timeout_s: float) -> list[ProcessId]:
    """Wait for processes to end by themselves; returns those that are still there."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if not process.gone]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [process for process in left if not process.gone]
    return left


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when ``parent`` ends; leave at once if it has ended.

    Call it from the main thread: the kernel watches the thread of the parent that started us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def on_exit_of(pid: int, callback: Callable[[], None]) -> None:
    """Run ``callback`` in a daemon thread once process ``pid`` has ended."""
    fd = os.pidfd_open(pid)

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
        os.close(fd)
        callback()

    threading.Thread(target=watch, name=f"exit of {pid}", daemon=True).start()


def _started(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return -1
