"""From a row of the output ring to a StepResult, without stopping the device."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import GraphCost, StepResult
from lockstep.worker.events import DeviceEvent
from lockstep.worker.host_logprobs import HostLogprobs
from lockstep.worker.output_ring import (
    NOT_FINITE,
    OUT_OF_STEP,
    PEER_SHIFT,
    SLOT_FAULT,
    STATUS,
    OutputRing,
)


class SlotFault(RuntimeError):
    """A live lane wrote to the padding block: a step ran beyond the blocks it was granted."""


class HostRow:
    """A copy of one ring row on its way to the host."""

    def __init__(self, ring: OutputRing) -> None:
        device = ring.rows.device
        cuda = device.type == "cuda"
        self._host = torch.empty(ring.rows.shape[1:], dtype=torch.int32, pin_memory=cuda)
        self._copied = DeviceEvent(device)
        self.in_use = False

    def start(self, ring: OutputRing, step: int) -> None:
        assert not self.in_use, "a result was not read before its host row came round again"
        self.in_use = True
        self._host.copy_(ring.row(step), non_blocking=True)
        self._copied.record()

    def ready(self) -> bool:
        return self._copied.passed()

    def take(self) -> np.ndarray:
        """[3, max_lanes] int32, waiting if need be; the row may then be used again."""
        self._copied.wait()
        self.in_use = False
        row: np.ndarray = self._host.numpy().copy()
        return row


@dataclass(frozen=True, slots=True)
class StepIdentity:
    """What a result says of the step it belongs to, fixed at launch."""

    epoch: int
    step_id: int
    dp_rank: int
    tp_rank: int
    num_lanes: int
    run_mode: int


class Pending(Protocol):
    """What a plan started and a loop publishes."""

    @property
    def identity(self) -> StepIdentity: ...

    def ready(self) -> bool: ...

    def discard(self) -> None: ...

    def result(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class PendingCapture:
    """A capture that a plan ordered; it is done when this exists."""

    identity: StepIdentity
    cost: GraphCost

    def ready(self) -> bool:
        return True

    def discard(self) -> None:
        """Nothing is on its way."""

    def result(self) -> StepResult:
        step = self.identity
        return StepResult(
            step.epoch, step.step_id, step.dp_rank, step.tp_rank, b"", b"", captured=self.cost
        )


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. Its lanes are those of its own plan, whatever was planned since."""

    identity: StepIdentity
    row: HostRow
    logprobs: HostLogprobs | None = None

    def ready(self) -> bool:
        return self.row.ready()

    def discard(self) -> None:
        """Wait for the step and look at nothing: for warm-up."""
        self.row.take()

    def result(self) -> StepResult:
        """The step's result, waiting for the device if need be.

        Raises:
            SlotFault: a live lane had no block for its slot.
            RankMismatch: a replica of the lockstep group is at another step.
        """
        step, row = self.identity, self.row.take()
        _check(row[STATUS], step)
        counts, token_ids, status = row[:, : step.num_lanes]
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            dp_rank=step.dp_rank,
            tp_rank=step.tp_rank,
            counts=counts.astype("<i4").tobytes(),
            token_ids=token_ids.astype("<i4").tobytes(),
            bad_lanes=np.flatnonzero(status & NOT_FINITE).tolist(),
            logprobs=self.logprobs.read(counts, token_ids) if self.logprobs else [],
            run_mode=step.run_mode,
        )


def _check(status: np.ndarray, step: StepIdentity) -> None:
    faulty = np.flatnonzero(status[: step.num_lanes] & SLOT_FAULT).tolist()
    if faulty:
        raise SlotFault(f"step {step.step_id}: lanes {faulty} wrote to the padding block")
    if status[0] & OUT_OF_STEP:
        raise RankMismatch(
            f"step {step.step_id}: replica {int(status[0]) >> PEER_SHIFT} of the lockstep group "
            f"is not at the step of dp_rank {step.dp_rank}"
        )
