"""Memory into which the ranks of a group write rows for each other, without any barrier.

The order that keeps it whole: a row of a call ends on a rank once it has read the words of that
row from all ranks, and a rank writes a row of its next call only after its own has ended. So when
rank A writes a row for the n-th time, A has read what B wrote for the (n-1)-th; B wrote that after
its (n-2)-th had ended, in which it read A's words of the (n-2)-th. Two buffers in turn therefore
never lose a word that is still to be read, whatever else the ranks do and however late they are.
One would: B may still be reading the (n-1)-th while A writes the n-th.

Each row counts for itself, on the device: graphs of all sizes and eager calls may follow each
other in any order that is equal on all ranks. Which program of a rank sends and reads a row, and
after which others, is its own matter, if only its calls do not overlap. Counts wrap after 2^32
calls; then a word is held to be new if it has not been overwritten for exactly so many.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.all_reduce.symmetric import SymmetricBuffer
from lockstep.comm.groups import Group

NUM_BUFFERS = 2
# Each word of data has one beside it that tells which call it belongs to.
_BYTES_PER_BYTE = 2


@dataclass(frozen=True)
class PushBuffer:
    """The memory of one rank, and where that of the others is seen from here.

    A rank's memory is [2 buffers][max_rows][ranks, by who writes][2 * row_bytes].
    """

    addresses: Tensor  # [ranks] int64
    epochs: Tensor  # [max_rows] int32: how often each row has been summed
    late: Tensor  # [1] int32: not 0 once a wait was given up
    rank: int
    max_rows: int
    row_bytes: int
    shared: SymmetricBuffer

    @property
    def world(self) -> int:
        return len(self.addresses)

    @property
    def source_bytes(self) -> int:
        """From what one rank writes of a row to what the next does."""
        return _BYTES_PER_BYTE * self.row_bytes

    @classmethod
    def create(cls, group: Group, max_rows: int, row_bytes: int) -> "PushBuffer":
        """Allocate and meet. Called by all ranks of the group; not while capturing.

        No rank may sum before all have returned from here.

        Args:
            row_bytes: of the largest row, a multiple of 8.

        Raises:
            RuntimeError: torch's symmetric memory cannot be allocated or met.
        """
        shared = SymmetricBuffer.create(group, buffer_bytes(group.size, max_rows, row_bytes))
        shared.data.zero_()
        torch.cuda.synchronize(group.device)
        return cls.over(shared, group.rank, max_rows, row_bytes)

    @classmethod
    def over(
        cls, shared: SymmetricBuffer, rank: int, max_rows: int, row_bytes: int
    ) -> "PushBuffer":
        """In memory that holds zeros on all ranks."""
        own, device = shared.data, shared.data.device
        peers = [
            own if peer == rank else shared.handle.get_buffer(peer, own.shape, own.dtype, 0)
            for peer in range(shared.size)
        ]
        return cls(
            addresses=torch.tensor([peer.data_ptr() for peer in peers], device=device),
            epochs=torch.zeros(max_rows, dtype=torch.int32, device=device),
            late=torch.zeros(1, dtype=torch.int32, device=device),
            rank=rank,
            max_rows=max_rows,
            row_bytes=row_bytes,
            shared=shared,
        )


def buffer_bytes(world: int, max_rows: int, row_bytes: int) -> int:
    return NUM_BUFFERS * max_rows * world * _BYTES_PER_BYTE * row_bytes
