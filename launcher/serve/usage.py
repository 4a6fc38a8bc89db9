"""How many tokens a call took, as OpenAI counts them."""

import msgspec

from lockstep.launcher.serve.generation import Generation


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt counts once for all its choices; end tokens count as completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(generation: Generation, n: int) -> Usage:
    """So far, of a call with ``n`` choices a prompt."""
    prompt, cached = generation.prompt_counts(n)
    completion = generation.num_completion_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached),
    )
