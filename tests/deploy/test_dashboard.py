"""The dashboard asks for metrics that there are, by labels that they have."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy" / "monitoring" / "grafana.json").read_text())
# Its names are compared with a real server's by test_metrics.py.
TABLE = [
    line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line[:3] == "| `"
]
COMMON = {"model_name", "engine", "le"}
QUERIES = [t["expr"] for panel in BOARD["panels"] for t in panel["targets"]]


def row_of(name: str) -> str:
    """The line of the table that describes a metric, or a series of its histogram."""
    family = re.sub(r"_(bucket|sum|count)$", "", name)
    rows = [row for row in TABLE if f"`{family}`" in row.split(" | ")[0]]
    assert len(rows) == 1, f"{name} is no metric"
    assert ("histogram" in rows[0]) == (family != name)
    return rows[0]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_is_of_metrics_that_exist_with_labels_that_they_have(query: str) -> None:
    rows = [row_of(name) for name in re.findall(r"lockstep_\w+", query)]
    assert rows
    used = set(re.findall(r"(\w+) ?=~?\"", query))
    for labels in re.findall(r"by \(([^)]*)\)", query):
        used |= {label.strip() for label in labels.split(",")}
    further = set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[2] for row in rows)))
    assert used <= COMMON | further
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


@pytest.mark.parametrize("query", QUERIES)
def test_counters_and_buckets_are_rates_and_gauges_are_not(query: str) -> None:
    for name in re.findall(r"lockstep_\w+", query):
        counts = name.endswith(("_total", "_bucket"))
        assert counts == (f"rate({name}{{" in query)


def test_what_gateways_and_people_look_for_is_shown() -> None:
    shown = set(re.findall(r"lockstep_\w+", " ".join(QUERIES)))
    wanted = (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total",
        "num_preemptions_total", "steps_total", "step_tokens_total",
    )  # fmt: skip
    assert {f"lockstep_{name}" for name in wanted} <= shown


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_panels_have_ids_of_their_own_and_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not any(overlap(*pair) for pair in combinations(places, 2))


def test_variables_that_queries_use_are_defined() -> None:
    defined = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(BOARD)))
    assert used == defined
