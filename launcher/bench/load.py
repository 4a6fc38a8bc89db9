"""A run: warm up, send each request when it is due, wait for all answers."""

import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext

from lockstep.launcher.bench.arrivals import arrival_times
from lockstep.launcher.bench.client import Client, connect
from lockstep.launcher.bench.metrics import summarize
from lockstep.launcher.bench.options import BenchOptions
from lockstep.launcher.bench.prompts import make_prompts
from lockstep.launcher.bench.records import RequestRecord
from lockstep.launcher.bench.saved import Run
from lockstep.launcher.engine import Progress
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.inputs import PromptInput
from lockstep.launcher.progress import stages


def run_load(options: BenchOptions, label: str) -> Run:
    """One run against ``options.base_url``, with its progress on standard error.

    Raises:
        ValueError: the prompts cannot be read.
        LaunchError: the server does not come up, or fails in the warm-up.
    """
    prompts = make_prompts(options)
    with stages() as progress:
        return asyncio.run(_run(options, label, prompts, progress))


async def _run(
    options: BenchOptions, label: str, prompts: Sequence[PromptInput], progress: Progress
) -> Run:
    progress("waiting for the server", 0, 0)
    async with connect(options) as client:
        await _warm_up(client, prompts[: options.num_warmups], progress)
        # The collector would stop all streams at once, and there is no garbage yet.
        gc.collect()
        gc.freeze()
        start, cpu_start = time.perf_counter(), time.process_time()
        records = await _Load(client, options, start, progress).send_all(prompts)
        duration_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return Run(
        label=label,
        options=_changed(options),
        summary=summarize(records, duration_s, cpu_s),
        requests=records,
    )


async def _warm_up(client: Client, prompts: Sequence[PromptInput], progress: Progress) -> None:
    progress("warm-up", 0, 0)
    start = time.perf_counter()
    for record in await asyncio.gather(*(client.send(prompt, start) for prompt in prompts)):
        if record.error:
            raise LaunchError(f"a request of the warm-up failed: {record.error}")


class _Load:
    def __init__(
        self, client: Client, options: BenchOptions, start: float, progress: Progress
    ) -> None:
        self._client = client
        self._options = options
        self._start = start
        self._progress = progress
        self._num_done = 0
        limit = options.max_concurrency
        self._turn = asyncio.Semaphore(limit) if limit else nullcontext()

    async def send_all(self, prompts: Sequence[PromptInput]) -> list[RequestRecord]:
        """The records in the order of the prompts."""
        options, tasks = self._options, []
        times = arrival_times(len(prompts), options.request_rate, options.seed)
        self._progress("requests", 0, len(prompts))
        for prompt, due in zip(prompts, times, strict=True):
            await asyncio.sleep(self._start + due - time.perf_counter())
            tasks.append(asyncio.create_task(self._send(prompt, len(prompts))))
        return await asyncio.gather(*tasks)

    async def _send(self, prompt: PromptInput, total: int) -> RequestRecord:
        async with self._turn:
            record = await self._client.send(prompt, self._start)
        self._num_done += 1
        self._progress("requests", self._num_done, total)
        return record


def _changed(options: BenchOptions) -> dict[str, object]:
    defaults = BenchOptions()
    names = (name for name in BenchOptions.__struct_fields__ if name != "api_key")
    return {
        name: getattr(options, name)
        for name in names
        if getattr(options, name) != getattr(defaults, name)
    }
