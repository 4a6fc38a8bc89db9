"""The table that is shown."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.launcher.top.numbers import Window, engines
from lockstep.launcher.top.scrape import Scrape, start_of

_NONE = "-"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    return (
        _NONE
        if seconds is None
        else f"{1000 * seconds:.3g}"
        if seconds < 1
        else f"{1000 * seconds:.0f}"
    )


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}"


def _quantile(name: str, q: float) -> Callable[[Window], str]:
    return lambda window: _ms(window.quantile(name, q))


def _mode(mode: str) -> Callable[[Window], str]:
    return lambda window: _percent(window.share("steps_total", run_mode=mode))


_FIRST, _TOKEN, _STEP = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "step_time_seconds",
)
COLUMNS: tuple[tuple[str, Callable[[Window], str]], ...] = (
    ("running", lambda w: _number(w.gauge("num_requests_running"))),
    ("waiting", lambda w: _number(w.gauge("num_requests_waiting"))),
    ("KV %", lambda w: _percent(w.mean("kv_cache_usage_perc"))),
    ("prompt tok/s", lambda w: _number(w.rate("prompt_tokens_total"))),
    ("output tok/s", lambda w: _number(w.rate("generation_tokens_total"))),
    ("TTFT p50", _quantile(_FIRST, 0.5)),
    ("p99", _quantile(_FIRST, 0.99)),
    ("ITL p50", _quantile(_TOKEN, 0.5)),
    ("p99", _quantile(_TOKEN, 0.99)),
    ("step p50", _quantile(_STEP, 0.5)),
    ("FULL %", _mode("FULL")),
    ("PIECE %", _mode("PIECEWISE")),
    ("EAGER %", _mode("EAGER")),
    ("padding %", lambda w: _percent(w.share("step_tokens_total", kind="padding"))),
)


def show(before: Scrape, now: Scrape) -> RenderableType:
    """A line on the server and a row for each engine; times in milliseconds."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("engine", *(name for name, _ in COLUMNS)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, window in engines(before, now):
        table.add_row(name, *(cell(window) for _, cell in COLUMNS))
    return Group(Text(_headline(before, now)), table)


def _headline(before: Scrape, now: Scrape) -> str:
    models = ", ".join(now.values_of("model_name")) or "loading"
    whole = Window(before, now, {})
    reasons = now.values_of("finished_reason")
    ended = [(each, whole.count("request_success_total", finished_reason=each)) for each in reasons]
    told = ", ".join(f"{count:.0f} {reason}" for reason, count in ended if count) or "none"
    up_s, seen_s = now.at - start_of(now).at, now.at - before.at
    refused = whole.count("admission_rejections_total")
    preempted = whole.count("num_preemptions_total")
    return (
        f"{models}, up {up_s:.0f} s; in the last {seen_s:.0f} s ended: {told}; "
        f"refused {refused:.0f}, preempted {preempted:.0f}; times in ms"
    )
