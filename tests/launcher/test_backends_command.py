"""``lockstep backends``."""

import pytest

from lockstep.launcher.cli import main
from lockstep.worker.attention.registry import BACKENDS


def test_every_backend_with_its_level_and_whether_it_runs_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["backends"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    for info in BACKENDS:
        support, here, *why = rows[info.name]
        assert support == info.support.name
        assert here in (("yes", "needs") if info.adapter else ("no",))
        assert why


def test_a_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--all"]) == 2
    assert capsys.readouterr().err == "lockstep: unrecognized arguments: --all\n"
