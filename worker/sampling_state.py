"""Sampling parameters, stop ids and token history of every lane, as static device tensors.

One row a lane, packed by type, so that a plan costs a few copies however many fields there are.
The sampler and its graphs read prefixes of these tensors; only ``position`` and ``history`` are
ever written on the device. What the host must know to choose a variant is mirrored here.
"""

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.messages import JoinLane, unpack_ids
from lockstep.comm.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from lockstep.worker.upload import Uploader

# A model brings a handful of end tokens beside the stop ids that a user may name.
MAX_LANE_STOP_IDS = MAX_STOP_IDS + 16
_FLOAT_FIELDS = 6
_INT_FIELDS = 4
_NO_ID = -1
_UPLOADS_ON_THEIR_WAY = 8


class Variant(IntEnum):
    """How much work a step's sampling is; each serves every lane that a lesser one serves.

    GREEDY only compares logits, PLAIN adds noise by temperature, FILTERED knows every parameter,
    LOGPROBS reports log-probabilities as well. A lane gets the same token from any that serves it.
    """

    GREEDY = 0
    PLAIN = 1
    FILTERED = 2
    LOGPROBS = 3


class LaneMirror(NamedTuple):
    """What the host knows of a lane. ``num_logprobs`` is None if none were asked for."""

    variant: Variant = Variant.GREEDY
    keeps_history: bool = False
    num_prompt_tokens: int = 0
    num_logprobs: int | None = None


_EMPTY_LANE = LaneMirror()


class KeptSampling(NamedTuple):
    """See ``LaneSampling.keep``."""

    floats: Tensor
    ints: Tensor
    history: dict[int, Tensor]
    mirror: tuple[LaneMirror, ...]


class LaneSampling:
    """Sampling state of ``num_lanes`` lanes on one rank.

    Attributes, all views of three tensors that never move:
        temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty:
            [num_lanes] float32; greedy lanes have temperature 0 and no filter.
        seed, position, min_tokens, top_k: [num_lanes] int64. ``position`` is the number of output
            tokens so far; ``top_k`` is vocab_size where off.
        stop_ids: [num_lanes, MAX_LANE_STOP_IDS] int64, -1 where unused.
        bias_ids, bias_values: [num_lanes, MAX_LOGIT_BIAS] int64 (-1 where unused) and float32.
        history: [num_lanes, vocab_local] int32: twice the count in the output, plus 1 if the
            prompt holds the token; only kept for lanes with penalties.
    """

    def __init__(
        self,
        num_lanes: int,
        *,
        vocab_start: int,
        vocab_local: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_lanes = num_lanes
        self.vocab_start = vocab_start
        self.vocab_local = vocab_local
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._empty_floats, self._empty_ints = _empty_row(vocab_size)
        self._floats = torch.tensor(self._empty_floats, device=device).repeat(num_lanes, 1)
        self._ints = torch.tensor(self._empty_ints, device=device).repeat(num_lanes, 1)
        self.history = torch.zeros(num_lanes, vocab_local, dtype=torch.int32, device=device)
        row_size = 4 + len(self._empty_floats) + len(self._empty_ints)
        self._upload = Uploader(num_lanes * row_size, _UPLOADS_ON_THEIR_WAY, self.device)
        self._name_views()
        self._mirror = [_EMPTY_LANE] * num_lanes
        self._tally: Counter[Variant] = Counter()

    def _name_views(self) -> None:
        floats, ints = self._floats, self._ints
        self.temperature, self.top_p, self.min_p = floats[:, 0], floats[:, 1], floats[:, 2]
        self.presence_penalty, self.frequency_penalty = floats[:, 3], floats[:, 4]
        self.repetition_penalty = floats[:, 5]
        self.bias_values = floats[:, _FLOAT_FIELDS:]
        self.seed, self.position = ints[:, 0], ints[:, 1]
        self.min_tokens, self.top_k = ints[:, 2], ints[:, 3]
        self.stop_ids = ints[:, _INT_FIELDS : _INT_FIELDS + MAX_LANE_STOP_IDS]
        self.bias_ids = ints[:, _INT_FIELDS + MAX_LANE_STOP_IDS :]

    def statics(self) -> dict[str, Tensor]:
        """The tensors that graphs hold addresses of, by name."""
        return {
            "sampling_floats": self._floats,
            "sampling_ints": self._ints,
            "sampling_history": self.history,
        }

    def variants(self) -> tuple[Variant, ...]:
        """Every variant that ``variant()`` can give on this device, least first."""
        return tuple(v for v in Variant if v >= self._least_variant)

    def variant(self) -> Variant:
        """The least variant that serves every lane present. A host decision, without a sync."""
        return max((v for v, count in self._tally.items() if count), default=self._least_variant)

    @property
    def _least_variant(self) -> Variant:
        # On CUDA one kernel serves both and skips the noise by row: no second graph for GREEDY.
        return Variant.GREEDY if self.device.type == "cpu" else Variant.PLAIN

    def mirror(self, lane: int) -> LaneMirror:
        """What the host knows of a lane."""
        return self._mirror[lane]

    def write_rows(self, joins: Sequence[JoinLane]) -> None:
        """Fill the rows of lanes that requests take.

        Raises:
            ValueError: more stop ids than a lane holds, or an id outside the vocabulary.
        """
        if not joins:
            return
        floats, ints = self._empty_rows(len(joins))
        for row, join in enumerate(joins):
            _fill(floats[row], ints[row], join, self.vocab_size)
            self._set_mirror(join.lane, _mirror_of(join))
        fresh = [join.lane for join in joins if join.sampling.needs_history]
        self._write([join.lane for join in joins], floats, ints, fresh)

    def reset_rows(self, lanes: Sequence[int]) -> None:
        """Make lanes greedy dummies: no stop ids, no filters, position 0."""
        if not lanes:
            return
        for lane in lanes:
            self._set_mirror(lane, _EMPTY_LANE)
        self._write(lanes, *self._empty_rows(len(lanes)), [])

    def move_rows(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows (src, dst) all at once; a source that is no destination becomes a dummy."""
        if not moves:
            return
        with_history = [move for move in moves if self._mirror[move[0]].keeps_history]
        src, dst, history_src, history_dst = self._upload.send(
            *_columns(moves), *_columns(with_history)
        )
        for rows in (self._floats, self._ints):
            rows.index_copy_(0, dst, rows.index_select(0, src))
        if with_history:
            self.history.index_copy_(0, history_dst, self.history.index_select(0, history_src))
        sources, destinations = _columns(moves)
        mirrors = [self._mirror[lane] for lane in sources]
        for lane, mirror in zip(destinations, mirrors, strict=True):
            self._set_mirror(lane, mirror)
        self.reset_rows(sorted(set(sources) - set(destinations)))

    def record_chunk(self, lane: int, token_ids: Tensor, *, start: int) -> None:
        """Note prompt tokens, or outputs recomputed after a preemption, of a lane with penalties.

        Args:
            token_ids: [n] int64 on this device, the tokens computed in this step.
            start: place of the first of them in the request (its position).
        """
        mirror = self._mirror[lane]
        if not mirror.keeps_history:
            return
        num_prompt = min(max(mirror.num_prompt_tokens - start, 0), len(token_ids))
        local, held = self.to_local(token_ids)
        row = self.history[lane]
        marked = row[local[:num_prompt]] | held[:num_prompt].to(torch.int32)
        row.scatter_reduce_(0, local[:num_prompt], marked, "amax")
        row.index_add_(0, local[num_prompt:], 2 * held[num_prompt:].to(torch.int32))

    def to_local(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Index in this rank's shard (0 where another rank holds the token), and a mask of ours."""
        local = token_ids - self.vocab_start
        held = (local >= 0) & (local < self.vocab_local) & (token_ids >= 0)
        return torch.where(held, local, 0), held

    def keep(self) -> "KeptSampling":
        """A copy on the host of every lane's rows; history only of lanes that keep one."""
        mirror = tuple(self._mirror)
        floats, ints = (rows.to("cpu", copy=True) for rows in (self._floats, self._ints))
        history = {
            lane: self.history[lane].to("cpu", copy=True)
            for lane, known in enumerate(mirror)
            if known.keeps_history
        }
        return KeptSampling(floats, ints, history, mirror)

    def put_back(self, kept: "KeptSampling") -> None:
        """Restore, in place, what ``keep`` gave."""
        self._floats.copy_(kept.floats)
        self._ints.copy_(kept.ints)
        for lane, row in kept.history.items():
            self.history[lane].copy_(row)
        for lane, mirror in enumerate(kept.mirror):
            self._set_mirror(lane, mirror)

    def _set_mirror(self, lane: int, mirror: LaneMirror) -> None:
        self._tally[self._mirror[lane].variant] -= 1
        self._tally[mirror.variant] += 1
        self._mirror[lane] = mirror

    def _empty_rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return np.tile(self._empty_floats, (number, 1)), np.tile(self._empty_ints, (number, 1))

    def _write(
        self, lanes: Sequence[int], floats: np.ndarray, ints: np.ndarray, fresh: Sequence[int]
    ) -> None:
        """Send whole rows in one copy, floats by their bits; empty the history of ``fresh``."""
        index, fresh_index, bits, whole = self._upload.send(
            lanes, fresh, floats.view(np.int32).ravel(), ints.ravel()
        )
        sent = bits.to(torch.int32).view(torch.float32)
        self._floats.index_copy_(0, index, sent.view(len(lanes), -1))
        self._ints.index_copy_(0, index, whole.view(len(lanes), -1))
        if fresh:
            self.history.index_fill_(0, fresh_index, 0)


def _columns(moves: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [src for src, _ in moves], [dst for _, dst in moves]


def _empty_row(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    floats = np.zeros(_FLOAT_FIELDS + MAX_LOGIT_BIAS, dtype=np.float32)
    floats[:_FLOAT_FIELDS] = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    ints = np.full(_INT_FIELDS + MAX_LANE_STOP_IDS + MAX_LOGIT_BIAS, _NO_ID, dtype=np.int64)
    ints[:_INT_FIELDS] = [0, 0, 0, vocab_size]
    return floats, ints


def _fill(floats: np.ndarray, ints: np.ndarray, join: JoinLane, vocab_size: int) -> None:
    """Write a request's parameters over an empty row."""
    sampling, stop_ids = join.sampling, unpack_ids(join.stop_ids)
    if len(stop_ids) > MAX_LANE_STOP_IDS:
        limit = f"at most {MAX_LANE_STOP_IDS} ids, got {len(stop_ids)}"
        raise ValueError(f"stop_ids of request {join.req_id} must be {limit}")
    sampling.check_vocab(vocab_size)
    bias = sampling.logit_bias or {}
    floats[0], floats[1:3] = sampling.temperature, _shares(sampling)
    floats[3:_FLOAT_FIELDS] = _penalties(sampling)
    floats[_FLOAT_FIELDS : _FLOAT_FIELDS + len(bias)] = list(bias.values())
    top_k = sampling.top_k if sampling.has_filters and sampling.top_k > 0 else vocab_size
    numbers = [join.seed, join.num_output_tokens, sampling.min_tokens, min(top_k, vocab_size)]
    ints[:_INT_FIELDS] = numbers
    ints[_INT_FIELDS : _INT_FIELDS + len(stop_ids)] = stop_ids
    first_bias = _INT_FIELDS + MAX_LANE_STOP_IDS
    ints[first_bias : first_bias + len(bias)] = list(bias)


def _shares(sampling: SamplingParams) -> tuple[float, float]:
    return (sampling.top_p, sampling.min_p) if sampling.has_filters else (1.0, 0.0)


def _penalties(sampling: SamplingParams) -> tuple[float, float, float]:
    return sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty


def _mirror_of(join: JoinLane) -> LaneMirror:
    return LaneMirror(
        variant=_variant_of(join),
        keeps_history=join.sampling.needs_history,
        num_prompt_tokens=join.num_prompt_tokens,
        num_logprobs=join.sampling.logprobs,
    )


def _variant_of(join: JoinLane) -> Variant:
    sampling = join.sampling
    holds_back_stop = bool(join.stop_ids) and sampling.min_tokens > join.num_output_tokens
    if sampling.logprobs is not None:
        return Variant.LOGPROBS
    if sampling.has_filters or sampling.needs_history or sampling.logit_bias or holds_back_stop:
        return Variant.FILTERED
    return Variant.GREEDY if sampling.is_greedy else Variant.PLAIN
