"""One draw a lane: the id with the best logit plus noise times temperature.

``argmax(logits / T + noise)`` samples from softmax(logits / T) (the Gumbel-max rule); times T it
is ``argmax(logits + T * noise)``, which needs no division and is plain argmax for greedy lanes.
"""

from torch import Tensor

from lockstep.worker.filters import cut
from lockstep.worker.noise import gumbel
from lockstep.worker.sampling_state import LaneSampling, Variant


def draw(
    logits: Tensor, lanes: LaneSampling, *, start: int, variant: Variant
) -> tuple[Tensor, Tensor]:
    """The best score of each lane and the id that has it, the lowest among equals.

    Args:
        logits: [num_reqs, count] float32 of ids ``start`` .. ``start + count - 1``.

    Returns:
        scores [num_reqs] float32, not finite if the row holds NaN or +inf or only -inf, and
        ids [num_reqs] int64.
    """
    if logits.is_cuda:
        from lockstep.worker.kernels import sample

        return sample.draw(logits, lanes, start)
    scores = logits if variant is Variant.GREEDY else _noisy(logits, lanes, start)
    best = scores.max(dim=-1)
    return best.values, best.indices + start


def draw_splits(
    logits: Tensor, lanes: LaneSampling, *, start: int, variant: Variant
) -> tuple[Tensor, Tensor]:
    """``draw`` before the last comparison: [num_reqs, n] scores and ids, n 1 on a CPU."""
    if logits.is_cuda:
        from lockstep.worker.kernels import sample

        return sample.split_best(logits, lanes, start)
    scores, ids = draw(logits, lanes, start=start, variant=variant)
    return scores[:, None], ids[:, None]


def draw_filtered(logits: Tensor, lanes: LaneSampling, variant: Variant) -> tuple[Tensor, Tensor]:
    """``draw`` among the tokens that min_p, top_k and top_p keep: [num_reqs, n] scores and ids.

    Args:
        logits: over all shards; overwritten.
    """
    if logits.is_cuda:
        from lockstep.worker.kernels import cut as kernels

        return kernels.draw_filtered(logits, lanes)
    return draw_splits(cut(logits, lanes), lanes, start=0, variant=variant)


def _noisy(logits: Tensor, lanes: LaneSampling, start: int) -> Tensor:
    num_reqs, count = logits.shape
    noise = gumbel(lanes.seed[:num_reqs], lanes.position[:num_reqs], start, count)
    return noise.mul_(lanes.temperature[:num_reqs, None]).add_(logits)
