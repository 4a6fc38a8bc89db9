"""A kernel that a graph does not hold is found before anybody is served."""

import pytest
import torch
from gpu_rig import gpu_config
from ranks import Rank, rank_outcomes
from torch import Tensor

from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.loop import Worker
from lockstep.worker.models.decoder import DecoderModel

pytestmark = pytest.mark.gpu


def start_with_a_stray_kernel(rank: Rank) -> None:
    """The LM head runs on a stream of its own, as a kernel without an explicit stream would."""
    torch.cuda.set_device(0)
    stray, logits = torch.cuda.Stream(), DecoderModel.logits

    def elsewhere(model: DecoderModel, hidden: Tensor, out: Tensor) -> Tensor:
        own, waits = torch.cuda.current_stream(), not torch.cuda.is_current_stream_capturing()
        if waits:
            stray.wait_stream(own)
        with torch.cuda.stream(stray):
            made = logits(model, hidden, out)
        if waits:
            own.wait_stream(stray)
        return made

    DecoderModel.logits = elsewhere
    spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device="cuda:0")
    config = gpu_config()
    Worker(config, spec, Topology.create(spec, config.parallel)).start()


def test_a_kernel_on_another_stream_fails_the_self_check() -> None:
    [outcome] = rank_outcomes(start_with_a_stray_kernel, 1, gloo=False, timeout_s=110)
    assert isinstance(outcome.error, GraphError), outcome
    assert "the graph of size" in str(outcome.error)
