"""Sampling parameters of one request, as they travel from a front end to every rank."""

import math

import msgspec

from lockstep.comm.structured import StructuredOutputs

MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_IDS = 64


def _require(ok: bool, field: str, value: object, limit: str) -> None:
    if not ok:
        raise ValueError(f"{field} must be {limit}, got {value!r}")


# Producer: front end (CLI, LLM class, HTTP). Consumers: Scheduler, every rank (in JoinLane).
class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a request ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 are off. ``seed``
    None draws one at admission. ``max_tokens`` None means up to ``max_model_len``. ``stop`` strings
    are matched by the front end; ``stop_token_ids`` on the device. ``logprobs`` is the number of
    alternatives reported beside the sampled token (0: only the sampled one; None: none).
    ``structured_outputs`` is the form that the text must have.

    Raises:
        ValueError: names the field, the value and the limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        try:
            self._check_values()
        except TypeError:
            self._check_types()
            raise

    def _check_types(self) -> None:
        """Name what the checks could not compare; what was decoded has the right types already."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                needed = str(error).removeprefix("Expected ")
                raise ValueError(f"{field.name} must be {needed}: {value!r}") from None

    def _check_values(self) -> None:
        self._check_floats()
        self._check_ints()
        self._check_stops()
        for token_id, bias in (self.logit_bias or {}).items():
            _require(
                math.isfinite(bias) and -100 <= bias <= 100,
                f"logit_bias[{token_id}]", bias, "a finite number in [-100, 100]",
            )  # fmt: skip

    def _check_floats(self) -> None:
        for field, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.01, 100.0),
        ):
            value = getattr(self, field)
            ok = math.isfinite(value) and low <= value <= high
            _require(ok, field, value, f"a finite number in [{low}, {high}]")
        _require(self.top_p > 0, "top_p", self.top_p, "above 0")

    def _check_ints(self) -> None:
        _require(-1 <= self.top_k < 2**31, "top_k", self.top_k, "in [-1, 2**31)")
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            _require(1 <= self.max_tokens < 2**31, "max_tokens", self.max_tokens, "in [1, 2**31)")
            limit = f"in [0, max_tokens={self.max_tokens}]"
            _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.logprobs is not None:
            limit = f"in [0, {MAX_LOGPROBS}]"
            _require(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", self.logprobs, limit)

    def _check_stops(self) -> None:
        limit = f"at most {MAX_STOP_STRINGS} non-empty strings"
        _require(len(self.stop) <= MAX_STOP_STRINGS and all(self.stop), "stop", self.stop, limit)
        limit = f"at most {MAX_STOP_IDS} ids of at least 0"
        ids = self.stop_token_ids
        ok = len(ids) <= MAX_STOP_IDS and all(0 <= i < 2**31 for i in ids)
        _require(ok, "stop_token_ids", ids, limit)
        count = len(self.logit_bias or {})
        limit = f"at most {MAX_LOGIT_BIAS} entries"
        _require(count <= MAX_LOGIT_BIAS, "logit_bias", f"{count} entries", limit)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """True if the distribution is cut by top_k, top_p or min_p."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_history(self) -> bool:
        """True if logits depend on the tokens so far, so that a rank must see all of them."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError if a token id named here is not in the model's vocabulary."""
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias: its token ids", tuple(self.logit_bias or ())),
        ):
            for token_id in ids:
                _require(0 <= token_id < vocab_size, field, token_id, f"in [0, {vocab_size})")
