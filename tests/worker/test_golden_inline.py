"""The real model in one process against its golden continuations, all requests in one batch."""

import json
from pathlib import Path

import pytest
from inline import request, serve

from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import CacheConfig, GraphConfig, ScheduleConfig, WorkerConfig
from lockstep.worker.weights.generation import read_generation_defaults
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2.json"


@pytest.mark.slow
def test_smollm2_gives_the_golden_tokens() -> None:
    golden = json.loads(GOLDEN.read_text())
    path = resolve_model("smollm2")
    config = WorkerConfig(
        model=model_config_from(path),
        parallel=ParallelConfig(),
        cache=CacheConfig(num_gpu_blocks_override=60),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256),
        graph=GraphConfig(),
        model_path=str(path),
        dtype="float32",
    )
    ends = list(read_generation_defaults(path).eos_token_ids)
    adds = [
        request(str(i), item["prompt_ids"], ends, max_tokens=golden["max_new_tokens"])
        for i, item in enumerate(golden["items"])
    ]
    served, *_ = serve(config, adds)
    outputs = [served.tokens[str(i)] for i in range(len(adds))]
    assert outputs == [item["output_ids"] for item in golden["items"]]
