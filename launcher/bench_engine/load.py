"""Batches of requests through a front end, and how long they take."""

import random
import time
from collections.abc import Sequence

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.front_end import FrontEnd
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.prepare import PreparedRequest
from lockstep.launcher.session import run_all


class Load:
    """Greedy requests, none of which ends early."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._num_calls = 0

    def prompts(self, num_reqs: int, input_len: int, *, seed: int) -> list[list[int]]:
        """Random ones of the model's vocabulary."""
        draw, vocab_size = random.Random(seed), self._front.resolved.worker.model.vocab_size
        length = range(input_len)
        return [[draw.randrange(vocab_size) for _ in length] for _ in range(num_reqs)]

    def seconds(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """From the first request's way in to the last token's way out.

        Raises:
            EngineDead: the engine is lost, or a request failed; says why.
        """
        requests = [greedy(prompt, num_tokens) for prompt in prompts]
        began = time.perf_counter()
        self.run(requests)
        return time.perf_counter() - began

    def run(self, requests: Sequence[PreparedRequest]) -> list[RequestOutput]:
        """All of their answers; raises as ``seconds``."""
        session = self._front.session(prefix=f"call{self._num_calls}-")
        self._num_calls += 1
        outputs = run_all(session, requests)
        for request, output in zip(requests, outputs, strict=True):
            if len(output.token_ids) != request.sampling.max_tokens:
                reason = output.error or f"it has {len(output.token_ids)} tokens"
                raise EngineDead(f"request {output.index} of the load failed: {reason}")
        return outputs


def greedy(prompt_ids: list[int], num_tokens: int) -> PreparedRequest:
    """A request for exactly ``num_tokens``."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return PreparedRequest(prompt=None, prompt_ids=prompt_ids, sampling=sampling, stop_ids=())
