"""Holds an engine's answers against the model that it serves, computed once more in plain torch."""

from collections.abc import Sequence

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.topology import Topology
from lockstep.worker.accuracy import Accuracy, compare, sure_positions
from lockstep.worker.assembly import build_attention, build_model, torch_dtype
from lockstep.worker.config import WorkerConfig
from lockstep.worker.models.plain import PlainDecoder
from lockstep.worker.weights.load import open_source
from lockstep.worker.weights.source import TensorSource


# Producer: who had an engine answer. Consumer: ``judge``, in whatever process.
class Answer(msgspec.Struct, frozen=True):
    """A greedy one with the likeliest ids at each of its tokens and their log-probabilities."""

    prompt_ids: list[int]
    token_ids: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def judge(config: WorkerConfig, device: str, answers: Sequence[Answer]) -> list[Accuracy]:
    """Each answer against the model of ``config``, whose weights are read here once more.

    Args:
        answers: of prompts of one length, and of one length.
    """
    return judge_by(open_whole(config, torch.device(device)), config, device, answers)


def judge_by(
    source: TensorSource, config: WorkerConfig, device: str, answers: Sequence[Answer]
) -> list[Accuracy]:
    """``judge`` by weights that are given."""
    dtype = torch_dtype(config)
    wider = torch.float64 if dtype is torch.float32 else torch.float32
    forced = torch.tensor([[*each.prompt_ids, *each.token_ids[:-1]] for each in answers])
    last = len(answers[0].token_ids)
    truth, plain = (
        PlainDecoder(
            config.model, source, torch.device(device), weight_dtype=dtype, dtype=computed
        ).logits(forced, last)
        for computed in (wider, dtype)
    )
    return [_judged(*each) for each in zip(answers, truth, plain.to(wider), strict=True)]


def _judged(answer: Answer, truth: Tensor, plain: Tensor) -> Accuracy:
    """Logits are [num_positions, vocab_size]."""
    ids = torch.tensor(answer.top_ids, device=truth.device)
    told = torch.tensor(answer.top_logprobs, dtype=truth.dtype, device=truth.device)
    expected, plainly = (logits.log_softmax(-1).gather(1, ids) for logits in (truth, plain))
    token_ids = torch.tensor(answer.token_ids, device=truth.device)
    right = truth.argmax(1) == token_ids
    return compare(told - expected, plainly - expected, sure_positions(truth, plain), right)


def open_whole(config: WorkerConfig, device: torch.device) -> TensorSource:
    """The weights of ``config`` as one rank would read them; dummy ones are drawn on ``device``."""
    alone = structs.replace(
        config, parallel=ParallelConfig(), attention_backend="reference", compile=False
    )
    backend = build_attention(alone, torch.device("cpu"))
    model = build_model(alone, Topology.single("cpu"), backend, torch.device("meta"))
    return open_source(alone, list(model.weight_shards()), device)
