"""The numbers of the table, from the records of the requests."""

from collections.abc import Sequence

import msgspec
import numpy as np

from lockstep.launcher.bench.records import RequestRecord


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds; zeros if there is nothing to tell of."""

    mean: float
    median: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that failed are counted and otherwise left out.

    ``cpu_share`` is what the load generator used of one core: near 1 it measures itself.
    """

    num_completed: int
    num_failed: int
    duration_s: float
    cpu_share: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread


def summarize(records: Sequence[RequestRecord], duration_s: float, cpu_s: float) -> Summary:
    """Sum up requests that took ``duration_s`` together, from the first send to the last end.

    Args:
        cpu_s: seconds of processor time that sending and reading took.
    """
    done = [record for record in records if not record.error]
    num_prompt_tokens = sum(record.num_prompt_tokens for record in done)
    num_output_tokens = sum(record.num_output_tokens for record in done)
    return Summary(
        num_completed=len(done),
        num_failed=len(records) - len(done),
        duration_s=duration_s,
        cpu_share=cpu_s / duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=len(done) / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        ttft_ms=spread([record.ttft_s for record in done]),
        tpot_ms=spread([record.tpot_s for record in done if record.tpot_s is not None]),
        itl_ms=spread([gap for record in done for gap in record.itl_s]),
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Percentiles are interpolated between the two nearest values."""
    if not seconds:
        return Spread(0.0, 0.0, 0.0)
    millis = np.asarray(seconds) * 1000.0
    return Spread(float(millis.mean()), float(np.median(millis)), float(np.percentile(millis, 99)))
