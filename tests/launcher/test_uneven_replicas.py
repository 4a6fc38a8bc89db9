"""Replicas in lockstep with one long request against twenty short ones: the command returns."""

import json
import sys
from pathlib import Path

import launched
import pytest
from launched import PROMPT, Launched, answers, generate_arguments

pytestmark = pytest.mark.timeout(400)

PACKAGE = Path(launched.__file__).parents[2] / "deploy" / "package"
RUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LONG, SHORT = 300, 2


def test_a_command_returns_once_the_last_token_is_out(tmp_path: Path) -> None:
    arguments = generate_arguments(tmp_path, max_tokens=1, tp=1)
    lines = [PROMPT % (5, LONG), *(PROMPT % (6 + i, SHORT) for i in range(20))]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    arguments += ["-dp", "2", "--dp-lockstep", "always", "--max-num-seqs", "32"]
    command = [*RUN, "-m", "lockstep.launcher.torchrun", *arguments]
    started = Launched(command, tmp_path, PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1")
    try:
        started.await_text("mapping:")
        assert started.ended(timeout_s=120) == 0, started.stderr
    finally:
        started.clean_up()
    assert [len(ids) for ids in answers(tmp_path)] == [LONG] + [SHORT] * 20
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert {record["finish_reason"] for record in records} == {"length"}
