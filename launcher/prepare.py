"""From a user's prompt to a request that the scheduler takes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from lockstep.comm.messages import AddRequest, pack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.id_check import check_ids
from lockstep.launcher.inputs import BadInput, PromptInput
from lockstep.launcher.strict import convert
from lockstep.launcher.structured import StructureCheck, take_response_format
from lockstep.launcher.text_check import check_text
from lockstep.launcher.tokenize import AnyTokenizer, Tokenizer


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. ``prompt`` is its text as given or as rendered; None for bare ids."""

    prompt: str | None
    prompt_ids: list[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]

    def to_add(self, req_id: str) -> AddRequest:
        return AddRequest(
            req_id=req_id,
            prompt_ids=pack_ids(self.prompt_ids),
            sampling=self.sampling,
            stop_ids=pack_ids(self.stop_ids),
        )


Submission = PreparedRequest | BadInput


class Preparer:
    """Tokenizes and checks prompts for one model.

    Args:
        tokenizer: the model's.
        vocab_size: the model's, which may be larger than the tokenizer's.
        end_ids: the model's end tokens.
        defaults: sampling parameters that a prompt may override.
        max_model_len: tokens of a request; far longer texts are refused before they are tokenized.
        raw: do not put prompts into the chat template.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        *,
        vocab_size: int,
        end_ids: Sequence[int],
        defaults: dict[str, Any],
        max_model_len: int,
        raw: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._defaults = defaults
        self._max_model_len = max_model_len
        self._max_chars = tokenizer.longest_text(max_model_len)
        self._raw = raw or not tokenizer.has_chat_template
        self._structure = StructureCheck(has_tokens=isinstance(tokenizer, Tokenizer))

    def prepare(self, given: PromptInput) -> PreparedRequest:
        """Check everything that does not depend on the scheduler's limits.

        Raises:
            ValueError: names the field, the value and the limit.
        """
        sampling = self.sampling(given.sampling)
        text, ids = self._encode(given)
        if not ids:
            raise ValueError("prompt: it has no tokens")
        return PreparedRequest(
            prompt=text,
            prompt_ids=ids,
            sampling=sampling,
            stop_ids=stop_ids(sampling, self._end_ids),
        )

    def sampling(self, given: dict[str, Any]) -> SamplingParams:
        """Checked parameters of a request that sets ``given`` itself.

        Raises:
            ValueError: names the field, the value and the limit.
        """
        own = dict(given)
        named = take_response_format(own)
        fields = {**self._defaults, **own}
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        sampling = convert(fields, SamplingParams)
        sampling.check_vocab(self._vocab_size)
        if sampling.structured_outputs is not None:
            self._structure.check(named, sampling.structured_outputs)
        return sampling

    def _encode(self, given: PromptInput) -> tuple[str | None, list[int]]:
        if given.prompt_token_ids is not None:
            check_ids(given.prompt_token_ids, self._vocab_size, "prompt_token_ids")
            return None, given.prompt_token_ids
        if given.messages is not None:
            text = self._tokenizer.render_chat(given.messages, given.template_variables)
            return text, self._tokenizer.encode_chat(self._short(text))
        assert given.prompt is not None
        if self._raw:
            return given.prompt, self._tokenizer.encode(self._short(given.prompt))
        # Once it is rendered its characters could no longer be counted as the user does.
        check_text(given.prompt, "prompt")
        text = self._tokenizer.render_chat([{"role": "user", "content": given.prompt}])
        return given.prompt, self._tokenizer.encode_chat(self._short(text))

    def _short(self, text: str) -> str:
        if 0 < self._max_chars < len(text):
            raise ValueError(
                f"prompt must be at most {self._max_chars} characters, more than "
                f"max_model_len={self._max_model_len} tokens hold, got {len(text)}"
            )
        return text


def prepare_all(
    preparer: Preparer, inputs: Iterable[PromptInput | BadInput]
) -> Iterator[Submission]:
    """A prompt that cannot run keeps its place as an error."""
    for given in inputs:
        if isinstance(given, BadInput):
            yield given
            continue
        try:
            yield preparer.prepare(given)
        except ValueError as error:
            # The prompt may be the very thing that cannot be written as UTF-8.
            text = given.prompt and given.prompt.encode(errors="replace").decode()
            yield BadInput(str(error), text)


def stop_ids(sampling: SamplingParams, end_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that end the request on the device."""
    ends = () if sampling.ignore_eos else end_ids
    return tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
