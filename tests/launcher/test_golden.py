"""SmolLM2 gives the golden tokens: in this process, and over a pairwise cover of the matrix."""

from typing import Any

import golden
import pytest
from inline_engine import start_inline_engine
from pairwise import Case, all_cases, pairs, pairwise

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.llm import LLM

COVER = pairwise(golden.AXES)
# Only a full pool needs answers in full length.
FIRST = 24


def test_the_cover_is_small_and_complete() -> None:
    wanted = set().union(*map(pairs, all_cases(golden.AXES)))
    assert set().union(*map(pairs, COVER)) == wanted
    assert len(COVER) == 10


@pytest.mark.slow
@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(case.values()))
def test_every_launcher_gives_the_golden_tokens(case: Case) -> None:
    crowded = case["pool"] == "tiny" and case["requests"] == "mixed"
    verdict = golden.run(case, golden.MAX_TOKENS if crowded else FIRST)
    assert verdict.difference == ""
    assert (verdict.preemptions > 0) == crowded


def test_one_rank_in_this_process() -> None:
    items = golden.golden_items()
    sampling = SamplingParams(temperature=0, max_tokens=64)
    with LLM(
        "smollm2",
        start_engine=start_inline_engine,
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=48,
        max_model_len=128,
        num_gpu_blocks_override=9,
    ) as llm:
        prompts = [item["prompt_ids"] for item in [items[2], *items]]
        outputs: list[Any] = llm.generate(prompts, sampling)
        preemptions = sum(replica.num_preemptions for replica in llm.stats().replicas)
    assert [output.token_ids for output in outputs] == [
        item["output_ids"] for item in [items[2], *items]
    ]
    assert preemptions > 0
