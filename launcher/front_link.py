"""What rank 0 of a torchrun start and its front end say to each other, and what all ranks hear."""

from typing import Literal

import msgspec

from lockstep.comm.messages import WorkerReady
from lockstep.launcher.channels import RankChannels, Seating
from lockstep.worker.config import WorkerConfig


# Producer: front end. Consumers: rank 0, through it all ranks.
class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The model is resolved: load it."""

    worker: WorkerConfig
    device: Literal["cpu", "cuda"]


# Producer: rank 0. Consumers: all other ranks.
class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """There is nothing to serve; rank 0 tells why."""


# Producer: rank 0. Consumer: front end.
class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """How far rank 0 is with its start; see ``engine.Progress``."""

    stage: str
    done: int
    total: int


# Producer: rank 0. Consumer: front end.
class AllReady(msgspec.Struct, frozen=True, tag="ready"):
    """Every rank can serve, in order of global rank; and where they are."""

    ready: list[WorkerReady]
    seating: Seating


# Producer: front end. Consumers: rank 0, through it all ranks.
class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The scheduler's channels, in order of global rank."""

    channels: list[RankChannels]


LinkMessage = Begin | Leave | Stage | AllReady | Attach

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LinkMessage)


def encode_link(message: LinkMessage) -> str:
    """As text, since the store of the rendezvous carries text."""
    return _encoder.encode(message).decode()


def decode_link(text: str) -> LinkMessage:
    return _decoder.decode(text)
