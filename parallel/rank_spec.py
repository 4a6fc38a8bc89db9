"""The one record of who a rank is; made by the Ray, torchrun and Slurm adapters of the launcher."""

import msgspec


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Place of one rank. ``device`` is "cpu" or "cuda:<index>" as this process numbers its GPUs.

    ``local_rank`` counts along the ``local_world_size`` ranks of its host; 0: all are on one host.
    """

    global_rank: int
    world_size: int
    dp_rank: int
    tp_rank: int
    node_rank: int = 0
    local_rank: int = 0
    local_world_size: int = 0
    device: str = "cpu"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    epoch: int = 0

    @property
    def ranks_on_host(self) -> int:
        return self.local_world_size or self.world_size
