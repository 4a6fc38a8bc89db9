"""How a planned step is called in messages about steps that hang (pure, no torch)."""

from lockstep.comm.messages import StepAgreement
from lockstep.worker.graphs.mode import RunMode


def step_text(agreement: StepAgreement, capture: int | None) -> str:
    """Run mode, tokens of every replica and padded size; or which graph is captured."""
    if capture is not None:
        return f"capture of graph {capture}"
    counts = ", ".join(map(str, agreement.num_tokens_across_dp))
    mode, size = RunMode(agreement.run_mode).name, agreement.num_tokens_padded
    return f"{mode}, {counts} tokens padded to {size}"
