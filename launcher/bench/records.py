"""What is kept of one request."""

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and counts. ``error`` is empty if the request ended as it should."""

    start_s: float  # since the run's
    latency_s: float = 0.0  # from then to its last token
    ttft_s: float = 0.0  # to its first
    itl_s: list[float] = []  # between one token's arrival and the next one's
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None if there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)
