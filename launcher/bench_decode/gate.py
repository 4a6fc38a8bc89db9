"""Answers that are held against the model: how one is asked for in the midst of a batch."""

from msgspec import structs

from lockstep.launcher.bench_decode.options import GATE_IDS, GATE_LEN, GATE_PROMPT
from lockstep.launcher.bench_engine.load import Load, greedy
from lockstep.launcher.outputs import RequestOutput
from lockstep.worker.judge import Answer


def answer(load: Load, prompts: list[list[int]]) -> Answer:
    """To the beginning of the first prompt, with all others beside it.

    Raises:
        EngineDead: the engine is lost, or a request failed; says why.
    """
    first, *others = prompts
    judged = greedy(first[:GATE_PROMPT], GATE_LEN)
    sampling = structs.replace(judged.sampling, logprobs=GATE_IDS)
    beside = [greedy(prompt, GATE_LEN) for prompt in others]
    output, *_ = load.run([structs.replace(judged, sampling=sampling), *beside])
    return _answer(judged.prompt_ids, output)


def _answer(prompt_ids: list[int], output: RequestOutput) -> Answer:
    assert output.logprobs is not None
    tops = [told["top"] for told in output.logprobs]
    return Answer(
        prompt_ids,
        output.token_ids,
        [[each["token_id"] for each in top] for top in tops],
        [[each["logprob"] for each in top] for top in tops],
    )
