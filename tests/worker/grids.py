"""Grids for tests: from the flag names of the vectors, and at random."""

from hypothesis import strategies as st

from lockstep.worker.graphs.grid import Grid, build_grid

RENAMED = {
    "cudagraph_capture_sizes": "capture_sizes",
    "max_cudagraph_capture_size": "max_capture_size",
}


def grid_of(config: dict) -> Grid:
    """Build from the flag names that the vectors use."""
    args = {RENAMED.get(key, key): value for key, value in config.items()}
    query_len = 1 + args.pop("num_speculative_tokens", 0)
    if "compute_capability" in args:
        args["compute_capability"] = tuple(args["compute_capability"])
    return build_grid(query_len=query_len, **args)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tokens = draw(st.integers(1, 3000))
    user = draw(st.none() | st.lists(st.integers(1, tokens), min_size=1, max_size=9))
    cap = draw(st.none() | st.integers(1, 2000)) if user is None else None
    return build_grid(
        max_num_seqs=draw(st.integers(1, 1500)),
        max_num_batched_tokens=tokens,
        query_len=draw(st.integers(1, 9)),
        capture_sizes=user,
        max_capture_size=cap,
        compute_capability=draw(st.sampled_from([(9, 0), (10, 3)])),
        performance_mode=draw(st.sampled_from(["balanced", "interactivity", "throughput"])),
    )
