"""What to do with flags that vLLM or SGLang have and Lockstep has not."""

import re

SAME = {
    "--model-path": "--model",
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--dp": "--data-parallel-size",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--cuda-graph-bs": "--cudagraph-capture-sizes",
    "--cuda-graph-max-bs": "--max-cudagraph-capture-size",
    "--dist-timeout": "--distributed-timeout-seconds",
    "--compilation-config": "--cudagraph-mode, --cudagraph-capture-sizes and --compile",
    "-cc": "--cudagraph-mode, --cudagraph-capture-sizes and --compile",
}
_BY_LAUNCHER = "ranks come from Ray or torchrun, see docs/deploy.md"
NEEDLESS = {
    "--enable-chunked-prefill": "prompts are always cut to --max-num-batched-tokens",
    "--kv-cache-dtype": "the KV cache has the type of --dtype",
    "--scheduling-policy": "requests are served first come, first served",
    "--trust-remote-code": "code of a model is never run",
    "--disable-log-stats": "figures are at /metrics, not in the log",
    "--enable-log-requests": "requests are traced with --otlp-traces-endpoint",
    "--device-ids": "CUDA_VISIBLE_DEVICES chooses",
    "--enable-fault-tolerance": "a rank that dies ends the server, and its supervisor starts it",
    "--watchdog-config": "--distributed-timeout-seconds bounds every wait",
    "--watchdog-timeout": "--distributed-timeout-seconds bounds every wait",
    "--soft-watchdog-timeout": "--distributed-timeout-seconds bounds every wait",
    "--distributed-executor-backend": _BY_LAUNCHER,
    "--data-parallel-backend": _BY_LAUNCHER,
    "-dpb": _BY_LAUNCHER,
    "--data-parallel-size-local": _BY_LAUNCHER,
    "-dpl": _BY_LAUNCHER,
    "--data-parallel-address": _BY_LAUNCHER,
    "-dpa": _BY_LAUNCHER,
    "--data-parallel-rank": _BY_LAUNCHER,
    "--nnodes": _BY_LAUNCHER,
    "--node-rank": _BY_LAUNCHER,
    "--master-addr": _BY_LAUNCHER,
    "--master-port": _BY_LAUNCHER,
    "--headless": _BY_LAUNCHER,
    "--use-ray": _BY_LAUNCHER,
}


def advice(complaint: str) -> str | None:
    """What to write instead, if ``complaint`` is argparse's about such a flag."""
    found = re.match(r"unrecognized arguments: (-[^\s=]+)", complaint)
    flag = found[1] if found else ""
    if flag in SAME:
        return f"{flag} is not a flag here: the same is set by {SAME[flag]}"
    if flag in NEEDLESS:
        return f"{flag} is not a flag here, leave it out: {NEEDLESS[flag]}"
    return None
