"""Seeds for requests that bring none."""

import secrets
from hashlib import blake2b


def draw_seed(base: int | None, arrival: int) -> int:
    """A seed in [0, 2**63): from the system, or from ``base`` and the order of arrival."""
    if base is None:
        return secrets.randbits(63)
    digest = blake2b(f"{base}/{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
