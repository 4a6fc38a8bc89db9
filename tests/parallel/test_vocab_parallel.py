"""Embedding and LM head over real ranks against one table on one rank."""

import pytest
import torch
import torch.nn.functional as F
from gloo_tp import GlooTP
from ranks import Rank, run_ranks

from lockstep.parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from lockstep.parallel.placement import Placement

VOCAB, HIDDEN = 101, 8
TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
# Positive states against negative rows: every logit is negative, so a padded 0 would win.
NEGATIVE = -TABLE.abs()
STATES = TABLE[:5].abs() + 0.1


def fill(weights, table):
    for weight in weights:
        start, length = weight.shard.start, weight.shard.length
        weight.target[:length] = table[start : start + length]


def embed_and_score(rank: Rank, tied: bool):
    tp = GlooTP(rank)
    place = Placement(tp, torch.device("cpu"), torch.float32)
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN, place)
    head = ParallelLMHead(embedding, tied=tied)
    fill(embedding.weight_shards("embed"), NEGATIVE if tied else TABLE)
    fill(head.weight_shards("head"), NEGATIVE)
    embedded = embedding(torch.arange(VOCAB))
    return embedded.numpy(), tp.columns(head(STATES)).numpy()


@pytest.mark.parametrize(("size", "tied"), [(2, True), (4, False)])
def test_vocabulary_over_ranks(size, tied):
    for embedded, logits in run_ranks(embed_and_score, size, tied):
        expected = NEGATIVE if tied else TABLE
        assert (torch.from_numpy(embedded) == expected).all()
        logits = torch.from_numpy(logits)
        torch.testing.assert_close(logits[:, :VOCAB], F.linear(STATES, NEGATIVE))
        assert logits.shape[1] == VOCAB + -VOCAB % size
        assert (logits[:, VOCAB:] == float("-inf")).all()
        assert (logits.argmax(1) < VOCAB).all()
        assert (logits[:, :VOCAB] < 0).all()
