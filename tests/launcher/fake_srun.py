#!/usr/bin/env python3
"""A stand-in for srun: starts the tasks of a step on this machine, as on that many nodes.

SLURM_JOB_NUM_NODES nodes with ``--ntasks-per-node`` (else SLURM_NTASKS_PER_NODE) tasks each. A
signal is handed on; the first task that fails ends the others, and its exit code is the step's.
"""

import os
import signal
import subprocess
import sys
import time


def main(arguments: list[str]) -> int:
    per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    while arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        if name == "--ntasks-per-node":
            per_node = int(value)
    num_nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    step = {
        "SLURM_NTASKS": str(num_nodes * per_node),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    }
    tasks = [
        subprocess.Popen(arguments, env=os.environ | step | place(rank, per_node))
        for rank in range(num_nodes * per_node)
    ]
    signal.signal(signal.SIGTERM, lambda number, frame: tell(tasks, number))
    return wait_for(tasks)


def place(rank: int, per_node: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
    }


def wait_for(tasks: list[subprocess.Popen[bytes]]) -> int:
    while any(task.poll() is None for task in tasks):
        failed = [task.returncode for task in tasks if task.poll()]
        if failed:
            tell(tasks, signal.SIGKILL)
            return failed[0]
        time.sleep(0.05)
    return max(task.returncode for task in tasks)


def tell(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
