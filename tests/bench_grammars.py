"""Host cost of a grammar per token, in the scheduler's thread. Not collected by pytest.

    python tests/bench_grammars.py MODEL [--texts 40]

MODEL is a directory with tokenizer.json. Texts are random walks through masks, at most 200 tokens
each. Prints CPU time: microseconds per token, the mean and the 99th percentile.
"""

import argparse
import random
import sys
import time

from lockstep.comm.structured import StructuredOutputs
from lockstep.launcher.tokenize import load_tokenizer
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.grammars.matcher import Matcher
from lockstep.worker.grammars.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "more": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}
FORMS = {
    "JSON schema": StructuredOutputs(json=SCHEMA),
    "any JSON object": StructuredOutputs(json_object=True),
    "regex of a date": StructuredOutputs(regex=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"),
}
MOST_TOKENS = 200


def walk(matcher: Matcher, rng: random.Random) -> list[float]:
    """Seconds of CPU time for each token of one text."""
    times = list[float]()
    while not matcher.complete and len(times) < MOST_TOKENS:
        token_id = rng.choice(ids_in(matcher.mask))
        began = time.thread_time()
        matcher.take(token_id)
        times.append(time.thread_time() - began)
    return times


def ids_in(mask: bytes) -> list[int]:
    held = ((index, byte) for index, byte in enumerate(mask) if byte)
    return [8 * index + bit for index, byte in held for bit in range(8) if byte >> bit & 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=40)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    began, tokens = time.process_time(), list[bytes]()
    while token := tokenizer.token_bytes(len(tokens)):
        tokens.append(token)
    vocabulary = Vocabulary(tokens, tokenizer.special_ids)
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.start(FORMS["JSON schema"], [], []).result()
    out, seconds = sys.stdout, time.process_time() - began
    out.write(f"{len(tokens)} tokens read in {seconds:.2f} s\n")
    out.write("form             tokens   mean us    p99 us\n")
    for name, form in FORMS.items():
        rng, times = random.Random(0), list[float]()
        for _ in range(args.texts):
            times += walk(compiler.start(form, [], []).result(), rng)
        times.sort()
        mean, p99 = 1e6 * sum(times) / len(times), 1e6 * times[int(0.99 * len(times))]
        out.write(f"{name:16s} {len(times):6d} {mean:9.0f} {p99:9.0f}\n")


if __name__ == "__main__":
    main()
