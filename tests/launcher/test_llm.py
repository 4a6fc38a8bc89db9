"""The offline class over a fake engine."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_model import byte_tokenizer, write_byte_model
from fake_engine import FakeEngine

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.llm import LLM


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def llm(tmp_path: Path, engine: FakeEngine) -> Iterator[LLM]:
    model = write_byte_model(tmp_path)
    with LLM(model, start_engine=engine.start, device="cpu", max_num_seqs=2) as llm:
        yield llm
    assert engine.shutdowns == 1


def test_texts_and_ids_come_back_in_order(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["a longer one", byte_tokenizer().encode("ids").ids, "b"]
    assert [output.text for output in llm.generate(prompts)] == ["a longer one", "ids", "b"]
    assert [output.text for output in llm.generate("alone")] == ["alone"]
    assert [output.text for output in llm.generate(byte_tokenizer().encode("ids").ids)] == ["ids"]
    assert llm.generate([]) == []


def test_chat_goes_through_the_template(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    assert [output.text for output in llm.chat(one)] == ["[hi]"]
    assert [output.text for output in llm.chat([one, one])] == ["[hi]", "[hi]"]


def test_sampling_for_all_or_for_each(llm: LLM) -> None:
    short, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)
    assert [o.text for o in llm.generate(["abcd", "abcd"], short)] == ["a", "a"]
    assert [o.text for o in llm.generate(["abcd", "abcd"], [short, long])] == ["a", "abc"]
    with pytest.raises(ValueError, match="sampling: 2 are needed, got 1"):
        llm.generate(["a", "b"], [short])


def test_a_prompt_may_be_what_a_line_of_a_file_is(llm: LLM, engine: FakeEngine) -> None:
    ids = byte_tokenizer().encode("ids").ids
    prompts = [
        {"prompt_token_ids": ids},
        {"prompt": "text", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9, seed=5))
    assert [output.text for output in outputs] == ["ids", "te", "[hi]"]
    assert [add.sampling.seed for add in engine.added] == [5, 5, 5]
    assert [output.text for output in llm.generate({"prompt": "alone"})] == ["alone"]


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([{"promt": "a"}], "unknown field 'promt'; did you mean 'prompt'"),
        ([[1, "a"]], r"prompt_token_ids\[1\]: expected `int`, got `str`"),
        ([None], "exactly one of prompt, messages, prompt_token_ids is needed, got none"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_named(llm: LLM, prompts: Any, error: str) -> None:
    (output,) = llm.generate(prompts)
    assert output.finish_reason == "error" and re.match(error, output.error or "")


@pytest.mark.parametrize("prompts", [None, 5, b"bytes", {"a", "b"}, iter(["a"])])
def test_prompts_are_a_list_or_one_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be text, token ids, a dict, or a list"):
        llm.generate(prompts)
    with pytest.raises(ValueError, match="conversations must be a list of messages, or a list"):
        llm.chat(prompts)


@pytest.mark.parametrize("sampling", [{"max_tokens": 2}, [{"max_tokens": 2}], "greedy"])
def test_sampling_is_no_plain_data(llm: LLM, sampling: Any) -> None:
    with pytest.raises(ValueError, match="sampling must be SamplingParams, or a list with one"):
        llm.generate(["a"], sampling)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "a"), ("max_tokens", "2"), ("stop", 5), ("stop_token_ids", ["x"])],
)
def test_a_sampling_parameter_of_a_wrong_type_is_named(field: str, value: Any) -> None:
    error = f"^{field} must be `.*: {re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=error):
        SamplingParams(**{field: value})


def test_a_bad_prompt_harms_no_other(llm: LLM) -> None:
    prompts: Any = ["fine", [99999], "", [5] * 10_000, {"prompt": "a", "top_p": 2}, "too"]
    outputs = llm.generate(prompts)
    assert [output.text for output in outputs] == ["fine", "", "", "", "", "too"]
    for output, error in zip(
        outputs[1:5],
        ("prompt_token_ids[0] must be in", "prompt: it has no", "prompt must be below", "top_p"),
        strict=True,
    ):
        assert output.finish_reason == "error" and (output.error or "").startswith(error)
    assert outputs[0].error is None and outputs[5].error is None


def test_a_conversation_that_cannot_be_rendered_harms_no_other(llm: LLM) -> None:
    empty, fine, broken = llm.chat([[], [{"role": "user", "content": "hi"}], [{"role": "user"}]])
    assert (fine.text, fine.error) == ("[hi]", None)
    assert "at least one message" in (empty.error or "")
    assert "messages[0].content" in (broken.error or "")


def test_parameters_that_cannot_run_start_nothing(llm: LLM, engine: FakeEngine) -> None:
    bad = SamplingParams(stop_token_ids=(99999,))
    for sampling in (bad, [SamplingParams(), bad]):
        with pytest.raises(ValueError, match="stop_token_ids must be in"):
            llm.generate(["a", "b"], sampling)
    assert not engine.added


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'max_num_seqs'"):
        LLM(write_byte_model(tmp_path), max_num_seq=3)


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("late"),
        lambda llm: llm.chat([{"role": "user", "content": "late"}]),
        LLM.summary,
        LLM.stats,
        LLM.__enter__,
    ],
)
def test_a_closed_one_says_so(llm: LLM, engine: FakeEngine, use: Callable[[LLM], object]) -> None:
    llm.close()
    llm.close()
    with pytest.raises(LaunchError, match="^this LLM is closed$"):
        use(llm)
    assert not engine.added
