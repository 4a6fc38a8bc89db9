"""Keys of full blocks in the prefix cache: wide digests of all tokens up to the block's end."""

import sys
from array import array
from hashlib import blake2b

KEY_BYTES = 32


def root_key(*, adapter: str = "", salt: str = "") -> bytes:
    """Parent key of first blocks; requests with another adapter or salt share nothing."""
    named = blake2b(digest_size=KEY_BYTES)
    for part in (adapter, salt):
        raw = part.encode()
        named.update(len(raw).to_bytes(8, "little") + raw)
    return named.digest()


def extend_keys(
    keys: list[bytes], token_ids: "array[int]", num_blocks: int, block_size: int, root: bytes
) -> None:
    """Append keys until there are ``num_blocks``; each depends on its parent and its tokens."""
    for index in range(len(keys), num_blocks):
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        if sys.byteorder == "big":
            tokens.byteswap()
        parent = keys[-1] if keys else root
        keys.append(blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest())
