"""Every architecture against transformers in float32: in one piece, in chunks, token by token."""

import hf_models
import pytest
import torch
from one_request import OneRequest, loaded, worker_config

from lockstep.worker.weights.model_config import model_config_from

IDS = [int(i) for i in torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(3))]


@pytest.fixture(scope="module", params=hf_models.CASES)
def pair(request, tmp_path_factory):
    """(our model, transformers' logits of IDS)."""
    oracle = hf_models.make(request.param)
    path = hf_models.save(oracle, tmp_path_factory.mktemp("model"))
    model = loaded(worker_config(model_config_from(path), path))
    return model, hf_models.logits(oracle, IDS)


@pytest.mark.parametrize("chunk", [40, 13, 1])
def test_logits_are_those_of_transformers(pair, chunk):
    model, expected = pair
    request = OneRequest(model)
    parts = [request.forward(IDS[i : i + chunk]) for i in range(0, len(IDS), chunk)]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)
