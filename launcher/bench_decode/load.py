"""Batches of requests through a front end, and how long they take."""

import random
import time
from collections.abc import Sequence

from msgspec import structs

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.bench_decode.options import GATE_IDS, GATE_LEN, GATE_PROMPT
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.front_end import FrontEnd
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.prepare import PreparedRequest
from lockstep.launcher.session import run_all
from lockstep.worker.judge import Answer


class Load:
    """Greedy requests of random prompts, none of which ends early."""

    def __init__(self, front: FrontEnd, input_len: int) -> None:
        self._front = front
        self._input_len = input_len
        self._num_calls = 0

    def seconds(self, num_reqs: int, num_tokens: int, *, seed: int) -> float:
        """From the first request's way in to the last token's way out.

        Raises:
            EngineDead: the engine is lost, or a request failed; says why.
        """
        requests = [self._request(prompt, num_tokens) for prompt in self._prompts(num_reqs, seed)]
        began = time.perf_counter()
        self._run(requests)
        return time.perf_counter() - began

    def answer(self, num_reqs: int, *, seed: int) -> Answer:
        """One answer to be judged, from the midst of a batch of others; raises as ``seconds``."""
        first, *others = self._prompts(num_reqs, seed)
        judged = self._request(first[:GATE_PROMPT], GATE_LEN)
        sampling = structs.replace(judged.sampling, logprobs=GATE_IDS)
        beside = [self._request(prompt, GATE_LEN) for prompt in others]
        output, *_ = self._run([structs.replace(judged, sampling=sampling), *beside])
        return _answer(judged.prompt_ids, output)

    def _run(self, requests: Sequence[PreparedRequest]) -> list[RequestOutput]:
        session = self._front.session(prefix=f"call{self._num_calls}-")
        self._num_calls += 1
        outputs = run_all(session, requests)
        for request, output in zip(requests, outputs, strict=True):
            if len(output.token_ids) != request.sampling.max_tokens:
                reason = output.error or f"it has {len(output.token_ids)} tokens"
                raise EngineDead(f"request {output.index} of the load failed: {reason}")
        return outputs

    def _prompts(self, num_reqs: int, seed: int) -> list[list[int]]:
        draw, vocab_size = random.Random(seed), self._front.resolved.worker.model.vocab_size
        length = range(self._input_len)
        return [[draw.randrange(vocab_size) for _ in length] for _ in range(num_reqs)]

    def _request(self, prompt_ids: list[int], num_tokens: int) -> PreparedRequest:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return PreparedRequest(prompt=None, prompt_ids=prompt_ids, sampling=sampling, stop_ids=())


def _answer(prompt_ids: list[int], output: RequestOutput) -> Answer:
    assert output.logprobs is not None
    tops = [told["top"] for told in output.logprobs]
    return Answer(
        prompt_ids,
        output.token_ids,
        [[each["token_id"] for each in top] for top in tops],
        [[each["logprob"] for each in top] for top in tops],
    )
