"""The example of settings is accepted; the unit of systemd stops a server as it wants to be."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.launcher.errors import ConfigError, PlacementError
from lockstep.launcher.serve.command import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
TOML = DEPLOY / "lockstep.toml"
UNIT = DEPLOY / "systemd" / "lockstep.service"


def test_the_example_sets_what_it_says(tmp_path: Path) -> None:
    command = parse(["--config", str(TOML)])
    assert command.launch.model == "Qwen/Qwen3-0.6B"
    assert command.launch.max_num_queued_reqs == 1024
    assert (command.options.port, command.options.shutdown_timeout) == (8000, 60)
    slip = tmp_path / "slip.toml"
    slip.write_text(TOML.read_text().replace("max-num-seqs", "max-num-seq"))
    with pytest.raises(ConfigError, match="max_num_seq"):
        parse(["--config", str(slip)])


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_unit_waits_longer_than_the_server_and_leaves_its_ranks_to_it() -> None:
    service = unit()
    assert (
        float(service["TimeoutStopSec"])
        >= parse(["--config", str(TOML)]).options.shutdown_timeout + 30
    )
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")


def test_the_unit_starts_anew_after_a_lost_rank_but_not_for_wrong_settings() -> None:
    service = unit()
    assert service["Restart"] == "on-failure"
    assert int(service["RestartPreventExitStatus"]) == ConfigError.exit_code
    assert PlacementError.exit_code != ConfigError.exit_code
    words = service["ExecStart"].split()[1:]
    assert words == ["serve", "--config", "/etc/lockstep/lockstep.toml"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # It must find the program, which is not installed where this runs.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/lockstep/bin/lockstep", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
