"""What grammars forbid, put into the logits of a step between its body and its tail.

Steps without a grammar do not come here, and graphs hold nothing of it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.messages import LaneMask
from lockstep.worker.upload import Uploader

WORD_BITS = 32
_UPLOADS_ON_THEIR_WAY = 2


def words_per_mask(vocab_size: int) -> int:
    """int32 words that hold a bit for every id."""
    return -(-vocab_size // WORD_BITS)


class LaneMasks:
    """Applies masks on one rank.

    Args:
        num_lanes: that may have a mask in one step.
        vocab_start: the first id of this rank's shard of the vocabulary.
    """

    def __init__(
        self, num_lanes: int, *, vocab_start: int, vocab_size: int, device: torch.device
    ) -> None:
        self._vocab_start = vocab_start
        self._num_words = words_per_mask(vocab_size)
        capacity = num_lanes * (self._num_words + 1)
        self._upload = Uploader(capacity, _UPLOADS_ON_THEIR_WAY, device, dtype=torch.int32)

    def apply(self, logits: Tensor, masks: Sequence[LaneMask]) -> None:
        """Put -inf wherever a lane's mask has no bit; in place.

        NaN and +inf stay what they are, to be noticed.

        Args:
            logits: [at least all lanes with a mask, vocab_local] float32.
        """
        packed = np.frombuffer(b"".join(mask.words for mask in masks), dtype="<i4")
        words, lanes = self._upload.send(packed, [mask.lane for mask in masks])
        words = words.view(len(masks), self._num_words)
        if not logits.is_cuda:
            return _forbid(logits, lanes, words, self._vocab_start)
        from lockstep.worker.kernels.mask import forbid

        return forbid(logits, lanes, words, self._vocab_start)


def _forbid(logits: Tensor, lanes: Tensor, words: Tensor, start: int) -> None:
    ids = torch.arange(start, start + logits.shape[1], device=logits.device)
    # The last shard may be longer than the vocabulary, with columns that are -inf already.
    places = (ids // WORD_BITS).clamp(max=words.shape[1] - 1)
    allowed = (words[:, places] >> (ids % WORD_BITS)) & 1
    rows = logits[lanes]
    forbidden = (allowed == 0) & (rows < float("inf"))
    logits[lanes] = rows.masked_fill(forbidden, float("-inf"))
