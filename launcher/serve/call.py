"""What the two generating APIs have in common in what a client may ask."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lockstep.launcher.prepare import PreparedRequest

MAX_CHOICES = 128
# Fields that would change the answer if we followed them, with values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """Where the usage is told: in a last chunk of its own, in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both APIs that are not sampling parameters.

    Raises:
        ValueError: fields that exclude each other; names them.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        if self.best_of not in (None, 1, self.n):
            raise ValueError(f"best_of must be 1 or n={self.n}, got {self.best_of}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")

    @property
    def streaming(self) -> StreamOptions | None:
        """How to stream the answer; None sends it whole."""
        return (self.stream_options or StreamOptions()) if self.stream else None


def choices_of(prompts: list[PreparedRequest], n: int) -> list[PreparedRequest]:
    """``n`` requests a prompt. The first has the seed that was given, each other the next one."""
    return [_seeded(prompt, choice) for prompt in prompts for choice in range(n)]


def _seeded(request: PreparedRequest, choice: int) -> PreparedRequest:
    seed = request.sampling.seed
    if seed is None or choice == 0:
        return request
    # The range of seeds is a circle.
    seed = (seed + choice + 2**63) % 2**64 - 2**63
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    return msgspec.structs.replace(request, sampling=sampling)
