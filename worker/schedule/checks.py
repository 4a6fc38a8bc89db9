"""What a request must satisfy before any state is made for it."""

from typing import NamedTuple

from lockstep.comm.messages import AddRequest, unpack_ids


class QueueFull(ValueError):
    """So many requests wait already that another one would only wait in vain."""


class Limits(NamedTuple):
    """Limits of a request; ``num_blocks`` are those that one request may hold."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int


def check_request(add: AddRequest, limits: Limits) -> int:
    """Return with how many output tokens a request ends by length.

    Without ``max_tokens`` that is as many as ``max_model_len`` and the pool hold.

    Raises:
        ValueError: names field, value and limit.
    """
    if not add.req_id:
        raise ValueError("req_id must not be empty, got ''")
    prompt = unpack_ids(add.prompt_ids)
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_ids", unpack_ids(add.stop_ids), limits.vocab_size)
    add.sampling.check_vocab(limits.vocab_size)
    if not 1 <= len(prompt) < limits.max_model_len:
        raise ValueError(
            f"prompt must hold 1 to {limits.max_model_len - 1} tokens "
            f"(max_model_len {limits.max_model_len} less one output), got {len(prompt)}"
        )
    room = limits.max_model_len - len(prompt)
    if add.sampling.max_tokens is None:
        outputs = min(room, max(1, limits.num_blocks * limits.block_size - len(prompt) + 1))
    else:
        outputs = min(room, add.sampling.max_tokens)
    _check_fits(len(prompt), outputs, limits)
    return outputs


def _check_ids(field: str, ids: list[int], vocab_size: int) -> None:
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        bad = next(each for each in ids if not 0 <= each < vocab_size)
        raise ValueError(f"{field} must be in [0, {vocab_size}), got {bad}")


def _check_fits(num_prompt: int, outputs: int, limits: Limits) -> None:
    needed = -(-(num_prompt + outputs - 1) // limits.block_size)
    if needed > limits.num_blocks:
        raise ValueError(
            f"prompt and max_tokens must fit into {limits.num_blocks} KV blocks of "
            f"{limits.block_size} tokens, got {num_prompt} + {outputs} tokens = {needed} blocks"
        )
