"""Is a model as near to the truth as its number type allows?

The truth is a plain model in a wider type, forced along the same tokens; what the type allows is
the error of a plain model in the type itself.
"""

import msgspec
from torch import Tensor

_RMS_TIMES = 1.5
_MOST_TIMES = 2.0
# What log-probabilities lose by being told in float32, whatever they were computed in.
_TOLD = 1e-5


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Errors against the truth, root mean square and largest, ours and the plain model's.

    ``num_sure`` positions have a best token that no error of the plain model's size can move;
    ``num_agreed`` of them got it.
    """

    num_positions: int
    num_sure: int
    num_agreed: int
    rms: float
    plain_rms: float
    most: float
    plain_most: float

    @property
    def passed(self) -> bool:
        """Every sure token is right, and no error is far above the plain model's."""
        near = (
            self.rms <= _RMS_TIMES * self.plain_rms + _TOLD
            and self.most <= _MOST_TIMES * self.plain_most + _TOLD
        )
        return near and self.num_agreed == self.num_sure


def sure_positions(truth: Tensor, plain: Tensor) -> Tensor:
    """[num_positions] bool, from logits [num_positions, vocab_size] of both."""
    best, second = truth.topk(2, dim=1).values.unbind(1)
    return best - second > 2 * (plain - truth).abs().amax(1)


def compare(errors: Tensor, plain_errors: Tensor, sure: Tensor, right: Tensor) -> Accuracy:
    """Sum up.

    Args:
        errors, plain_errors: of one shape, whatever was compared.
        sure, right: [num_positions] bool; whether the token is the truth's best.
    """
    return Accuracy(
        num_positions=len(sure),
        num_sure=int(sure.sum()),
        num_agreed=int((sure & right).sum()),
        rms=_rms(errors),
        plain_rms=_rms(plain_errors),
        most=float(errors.abs().max()),
        plain_most=float(plain_errors.abs().max()),
    )


def _rms(errors: Tensor) -> float:
    return float(errors.double().square().mean().sqrt())
