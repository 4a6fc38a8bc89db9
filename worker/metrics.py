"""What a worker counts, as plain data. Who shows it is the launcher's affair."""

from dataclasses import dataclass, field

from lockstep.comm.messages import StepPlan, StepResult
from lockstep.worker.graphs.mode import RunMode


@dataclass(slots=True)
class WorkerMetrics:
    """Counters since start. ``num_padding_tokens`` were computed for nobody."""

    num_steps: dict[RunMode, int] = field(default_factory=lambda: dict.fromkeys(RunMode, 0))
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_sampled_tokens: int = 0
    num_dropped_plans: int = 0
    last_step_id: int | None = None

    def launched(self, plan: StepPlan, replica_index: int) -> None:
        """Count one step of ``plan``."""
        agreement = plan.agreement
        num_tokens = agreement.num_tokens_across_dp[replica_index]
        self.num_steps[RunMode(agreement.run_mode)] += 1
        self.num_tokens += num_tokens
        self.num_padding_tokens += (agreement.num_tokens_padded or num_tokens) - num_tokens

    def published(self, result: StepResult) -> None:
        self.num_sampled_tokens += result.counts.count(1)
        self.last_step_id = result.step_id
