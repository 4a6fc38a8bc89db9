"""CUDA graphs: one pool, one capture stream, all graphs dropped together."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.graphs.guard import CaptureGuard


class CudaGraph:
    """One captured graph. All graphs of a process replay on one stream, in launch order."""

    __slots__ = ("_graph", "_owner")

    def __init__(self, graph: torch.cuda.CUDAGraph, owner: "CudaBackend") -> None:
        self._graph = graph
        self._owner = owner

    def replay(self) -> None:
        self._owner.check_stream()
        self._graph.replay()


class CudaSession:
    """Captures on the backend's stream, which warm-up uses too: libraries keep workspaces by
    stream, and those made in warm-up lie outside the pool and are shared by all graphs."""

    def __init__(self, backend: "CudaBackend") -> None:
        self._backend = backend
        self.is_open = True

    def warm_up(self, fn: Callable[[], None]) -> None:
        stream = self._backend.stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            fn()
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def idle(self) -> None:
        torch.cuda.synchronize(self._backend.device)

    def capture(self, fn: Callable[[], None]) -> CudaGraph:
        if not self.is_open:
            raise GraphError("no capture was ordered: the session is over")
        return self._backend.capture(fn)

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._backend.device)
        return total - free


class CudaBackend:
    """Owner of the pool, the capture stream and the set of graphs."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._replay_stream: int | None = None

    @contextmanager
    def session(self) -> Iterator[CudaSession]:
        # A collection inside a capture frees tensors there, and later ones stall all ranks.
        gc.collect()
        gc.freeze()
        gc.disable()
        session = CudaSession(self)
        try:
            yield session
        finally:
            session.is_open = False
            gc.enable()

    def capture(self, fn: Callable[[], None]) -> CudaGraph:
        """Record ``fn`` into the pool; used by the session.

        torch's context manager would also empty the allocator's cache, and steps outside graphs
        would have to allocate again when no memory is left.
        """
        graph, guard = torch.cuda.CUDAGraph(), CaptureGuard(self.device)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with guard:
                    fn()
            except BaseException:
                # Ending an invalid capture raises as well, which would hide what broke it.
                with suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs.append(graph)
        guard.check_kept()
        return CudaGraph(graph, self)

    def check_stream(self) -> None:
        """Refuse replays on a second stream: they could run side by side on one communicator."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if self._replay_stream is None:
            self._replay_stream = stream
        elif stream != self._replay_stream:
            raise GraphError("graphs replay on one stream, and this is another one")

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        torch.cuda.empty_cache()
        self._replay_stream = None
        self._pool = torch.cuda.graph_pool_handle()
