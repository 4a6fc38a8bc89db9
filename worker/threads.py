"""How many threads torch may use: the cores this process has, shared with its fellow ranks."""

import os

import torch

from lockstep.worker.cores import usable_cores


def set_thread_counts(device: torch.device, ranks_on_host: int) -> None:
    """Leave the user's OMP_NUM_THREADS alone; otherwise an equal share of the cores.

    A rank that serves from a GPU needs one: more of them spin in its way.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    share = max(1, usable_cores() // ranks_on_host)
    torch.set_num_threads(1 if device.type == "cuda" else share)
