"""What the limit of requests in a batch asks of the limit of tokens in a step."""


def tokens_in_step(asked: int | None, default: int, max_num_seqs: int) -> int:
    """``max_num_batched_tokens``: as asked, or the default where it gives each request a token."""
    return asked or max(default, max_num_seqs)


def check_token_each(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Refuse a step too small for a full batch.

    Raises:
        ValueError: names both limits.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens must be at least max_num_seqs={max_num_seqs}, got "
            f"{max_num_batched_tokens}: a step decodes one token for each request"
        )
