"""The prompts and the arrivals of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher.bench.arrivals import arrival_times
from lockstep.launcher.bench.options import BenchOptions, read_options
from lockstep.launcher.bench.prompts import make_prompts


def a_file(folder: Path, content: str) -> str:
    path = folder / "prompts"
    path.write_text(content)
    return str(path)


def test_random_prompts_have_the_lengths_and_ids_that_were_asked() -> None:
    options = BenchOptions(
        num_prompts=200, input_len=40, output_len=10, length_spread=0.5, vocab_size=7
    )
    prompts = make_prompts(options)
    lengths = [len(prompt.prompt_token_ids or ()) for prompt in prompts]
    limits = [prompt.sampling["max_tokens"] for prompt in prompts]
    assert (len(prompts), min(lengths), max(lengths)) == (200, 20, 60)
    assert (min(limits), max(limits)) == (5, 15)
    assert {id for prompt in prompts for id in prompt.prompt_token_ids or ()} == set(range(7))
    assert make_prompts(options) == prompts
    assert make_prompts(BenchOptions(num_prompts=200, seed=1)) != make_prompts(
        BenchOptions(num_prompts=200)
    )


def test_jsonl_as_generate_reads_it(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}']
    options = BenchOptions(prompts_file=a_file(tmp_path, "\n".join(lines)), num_prompts=2)
    first, second = make_prompts(options)
    assert (first.prompt, first.sampling) == ("a", {"max_tokens": 128})
    assert (second.messages, second.sampling["max_tokens"]) == (
        [{"role": "user", "content": "b"}],
        3,
    )


def sharegpt(folder: Path) -> str:
    def turns(*values: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": value} for value in values]}

    records = [turns("first", "an answer"), turns("alone"), turns("", "x"), turns("2", "b", "c")]
    return a_file(folder, json.dumps(records))


def test_sharegpt_gives_the_first_turns_that_were_answered(tmp_path: Path) -> None:
    options = BenchOptions(prompts_file=sharegpt(tmp_path), num_prompts=2, output_len=9)
    assert [prompt.prompt for prompt in make_prompts(options)] == ["first", "2"]
    assert {prompt.sampling["max_tokens"] for prompt in make_prompts(options)} == {9}


def test_sharegpt_answers_are_counted_by_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Words:
        def encode(self, text: str) -> list[str]:
            return text.split()

    monkeypatch.setattr("lockstep.launcher.bench.prompts.load_tokenizer", lambda path: Words())
    options = BenchOptions(
        prompts_file=sharegpt(tmp_path), num_prompts=2, tokenizer="words", endpoint="chat"
    )
    prompts = make_prompts(options)
    assert [prompt.sampling["max_tokens"] for prompt in prompts] == [2, 1]
    assert prompts[0].messages == [{"role": "user", "content": "first"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": 3}', r"prompts_file .*prompts: line 1: prompt: .* the value is 3"),
        ('{"prompt": "a"}', "num_prompts must be at most the 1 of .*prompts, got 2"),
        ("[{]", r"prompts_file .*prompts: no valid JSON"),
    ],
)
def test_a_file_that_cannot_serve_is_named(tmp_path: Path, content: str, message: str) -> None:
    options = BenchOptions(prompts_file=a_file(tmp_path, content), num_prompts=2)
    with pytest.raises(ValueError, match=message):
        make_prompts(options)


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    times = arrival_times(4001, 20.0, seed=0)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0 and min(gaps) > 0.0
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # Of an exponential distribution, 1/e of the gaps are longer than the mean.
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert arrival_times(3, None, seed=0) == [0.0] * 3
    assert arrival_times(9, 2.0, seed=5) == arrival_times(9, 2.0, seed=5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--serve-args", "-tp 2"], "serve_args '-tp 2' needs --modes"),
        (["--endpoint", "chat"], "endpoint chat needs --prompts-file"),
        (["--compare", "a.json", "--modes", "m"], "compare a.json excludes modes m"),
        (["--request-rate", "0"], "request_rate"),
        (["--length-spread", "1"], "length_spread"),
    ],
)
def test_flags_that_make_no_sense(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(argv)
