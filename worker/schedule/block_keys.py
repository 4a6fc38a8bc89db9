"""Keys of full blocks in the prefix cache: wide digests of all tokens up to the block's end."""

from hashlib import blake2b

from lockstep.comm.messages import ID_BYTES
from lockstep.worker.request import Request

KEY_BYTES = 32


def root_key(*, adapter: str = "", salt: str = "") -> bytes:
    """Parent key of first blocks; requests with another adapter or salt share nothing."""
    named = blake2b(digest_size=KEY_BYTES)
    for part in (adapter, salt):
        raw = part.encode()
        named.update(len(raw).to_bytes(8, "little") + raw)
    return named.digest()


def extend_keys(request: Request, num_blocks: int, block_size: int) -> None:
    """Give a request keys of its first ``num_blocks`` blocks; each depends on its parent's."""
    keys = request.block_keys
    for index in range(len(keys), num_blocks):
        parent = keys[-1] if keys else root_key(salt=request.cache_salt)
        start = index * block_size * ID_BYTES
        ids = request.packed_ids[start : start + block_size * ID_BYTES]
        keys.append(blake2b(parent + ids, digest_size=KEY_BYTES).digest())
