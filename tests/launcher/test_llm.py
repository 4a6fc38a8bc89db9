"""The offline class over a fake engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

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


def test_a_bad_prompt_starts_nothing(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match=r"prompt_token_ids\[0\] must be in"):
        llm.generate(["fine", [99999]])
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
