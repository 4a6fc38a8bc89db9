"""Build the all-reduces that a table names; fall back where symmetric memory cannot work."""

import logging
import os

import torch

from lockstep.comm.all_reduce.agreed import Host, agreed
from lockstep.comm.all_reduce.base import AllReduce
from lockstep.comm.all_reduce.choose import AllReduceTable
from lockstep.comm.all_reduce.gloo_nccl import library_all_reduce
from lockstep.comm.all_reduce.symmetric import (
    OneShotAllReduce,
    PeerFault,
    SymmetricBuffer,
    TwoShotAllReduce,
    find_bad_peer,
)
from lockstep.comm.all_reduce.table import (
    FUSED,
    Choice,
    check_table,
    parse_table,
    without_fused,
)
from lockstep.comm.errors import CommError
from lockstep.comm.groups import Group

_log = logging.getLogger(__name__)

# The crossing points measured on two H200s with NVLink; above 4 MiB nothing was measured.
AUTO_TABLE = "one_shot:65536,two_shot:4194304,nccl"
SYMMETRIC_BYTES = 4 << 20
_SYMMETRIC = ("one_shot", "two_shot", FUSED)
_WITHOUT_PEERS = "NCCL_P2P_DISABLE"


def create_all_reduce(group: Group, choice: str, host: Host) -> AllReduceTable:
    """Make the all-reduces of a group. Called by all its ranks, before any capture.

    ``choice`` is "auto", the name of an algorithm, or a table (see ``table``). With "auto",
    symmetric memory is used where every rank has read every peer through it. A fused all-reduce
    needs kernels, so it joins the table later (``AllReduceTable.rechosen``).

    Raises:
        ValueError: an unknown algorithm.
        CommError: the choice names symmetric memory and it cannot work here; says why.
    """
    library = library_all_reduce(group)
    choices = _choices(group, choice, library.name)
    algorithms: dict[str, AllReduce] = {library.name: library}
    buffer_bytes = 0
    limits = [limit for name, limit in choices if name in _SYMMETRIC]
    if limits:
        buffer = _symmetric_buffer(group, max(limit or SYMMETRIC_BYTES for limit in limits), host)
        if isinstance(buffer, str) and choice != "auto":
            raise CommError(f"all_reduce {choice!r} cannot work here: {buffer}")
        if isinstance(buffer, str):
            _log.info("all-reduce by %s only: %s", library.name, buffer)
            return AllReduceTable([Choice(library.name, None)], algorithms)
        algorithms |= {"one_shot": OneShotAllReduce(buffer), "two_shot": TwoShotAllReduce(buffer)}
        buffer_bytes = buffer.data.nbytes
    return AllReduceTable(without_fused(choices), algorithms, buffer_bytes)


def _choices(group: Group, choice: str, library: str) -> tuple[Choice, ...]:
    auto = AUTO_TABLE if group.device.type == "cuda" else library
    check_table(choice, group.device.type)
    choices = parse_table(auto if choice == "auto" else choice)
    if choices[-1].algorithm == library:
        return choices
    return (*choices[:-1], Choice(choices[-1].algorithm, SYMMETRIC_BYTES), Choice(library, None))


def _symmetric_buffer(group: Group, max_bytes: int, host: Host) -> SymmetricBuffer | str:
    """The buffer, or why there is none. All ranks get the same answer."""
    reason = agreed(host, _obstacle(group, host))
    if reason is not None:
        return reason
    buffer: SymmetricBuffer | None = None
    try:
        buffer = SymmetricBuffer.create(group, max_bytes)
    except RuntimeError as error:
        reason = f"no rendezvous: {error}"
    reason = agreed(host, reason)
    if buffer is None or reason is not None:
        return reason or "no rendezvous"
    return _distrusted(group, find_bad_peer(buffer, group.rank, host.barrier), host) or buffer


def _distrusted(group: Group, fault: PeerFault | None, host: Host) -> str | None:
    """What any rank found wrong with reading its peers. Then NCCL is kept from doing it, too.

    Raises:
        CommError: a copy does not end, so that whatever waits for this device would hang.
    """
    stuck = wrong = None
    if fault is not None:
        pair = f"rank {group.ranks[group.rank]} reads from rank {group.ranks[fault.peer]}"
        stuck = None if fault.ended else f"what {pair} does not arrive"
        wrong = f"what {pair} is wrong"
    stuck, wrong = agreed(host, stuck), agreed(host, wrong)
    if stuck is not None:
        raise CommError(f"peer access: {stuck}; {_WITHOUT_PEERS}=1 and all_reduce nccl do without")
    if wrong is not None:
        # No communicator of NCCL exists yet; it looks at its environment when it makes the first.
        os.environ[_WITHOUT_PEERS] = "1"
        _log.warning("peer access is not used, by NCCL neither: %s", wrong)
    return wrong


def _obstacle(group: Group, host: Host) -> str | None:
    """What can be known without trying."""
    own = group.device.index
    indices = host.all_gather_object(own)
    if not group.peers.same_host(group.ranks):
        return "the ranks are on several hosts"
    if len(set(indices)) < len(indices):
        return f"processes number their GPUs {indices}, so that devices overlap"
    for peer in indices:
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"GPU {own} has no peer access to GPU {peer}"
    return None
