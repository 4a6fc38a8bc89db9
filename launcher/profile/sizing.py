"""A worker as large as the profiled batches need, with their graphs and no others."""

import msgspec

from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.profile.options import ProfileOptions
from lockstep.worker.bare_steps import blocks_per_lane
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.profiling.decode import Effort


def decode_graphs_only(config: LaunchConfig) -> LaunchConfig:
    """The mode that captures nothing else, unless the user asks for another."""
    if config.cudagraph_mode is not None or config.optimization_level is not None:
        return config
    return msgspec.structs.replace(config, cudagraph_mode="FULL_DECODE_ONLY")


def sized(config: WorkerConfig, options: ProfileOptions, effort: Effort) -> WorkerConfig:
    """As large as the batches need, with the graphs that serve them and no others.

    Raises:
        ValueError: requests need more tokens than the model has positions.
    """
    _check_positions(config, options, effort)
    sizes = _graph_sizes(config, options)
    schedule = msgspec.structs.replace(
        config.schedule,
        max_num_seqs=max(sizes | {*options.batch}),
        max_num_batched_tokens=max(sizes | {*options.batch, options.input_len}),
        max_model_len=_context_len(options, effort),
    )
    graph = msgspec.structs.replace(
        config.graph, capture_sizes=tuple(sorted(sizes)) or None, max_capture_size=None
    )
    made = msgspec.structs.replace(config, schedule=schedule, graph=graph)
    num_blocks = 1 + max(options.batch) * blocks_per_lane(made)
    cache = msgspec.structs.replace(config.cache, num_gpu_blocks_override=num_blocks)
    return msgspec.structs.replace(made, cache=cache)


def _graph_sizes(config: WorkerConfig, options: ProfileOptions) -> set[int]:
    """What the batches are padded to where their graphs are some among many."""
    top, schedule = max(options.batch), config.schedule
    schedule = msgspec.structs.replace(
        schedule,
        max_num_seqs=max(top, schedule.max_num_seqs),
        max_num_batched_tokens=max(top, schedule.max_num_batched_tokens),
    )
    dispatch = create_dispatcher(config.graph, schedule).dispatch
    found = [dispatch(num_reqs, num_reqs, 1) for num_reqs in options.batch]
    return {padded.num_tokens for run_mode, padded in found if run_mode is not RunMode.EAGER}


def _check_positions(config: WorkerConfig, options: ProfileOptions, effort: Effort) -> None:
    needed, positions = _context_len(options, effort), config.model.max_position_embeddings
    if needed > positions:
        raise ValueError(
            f"input_len {options.input_len} and the {effort.steps_taken} steps behind it need "
            f"{needed} positions, and the model has {positions}"
        )


def _context_len(options: ProfileOptions, effort: Effort) -> int:
    return options.input_len + effort.steps_taken + 1
