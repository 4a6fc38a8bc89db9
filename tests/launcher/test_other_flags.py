"""Flags that users of other servers try: what to write instead, or why nothing is needed."""

import re
from pathlib import Path

import pytest

from lockstep.launcher import cli
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.llm import LLM
from lockstep.launcher.other_flags import ABSENT, NEEDLESS, SAME, advice
from lockstep.launcher.serve.command import parse as parse_serve
from lockstep.launcher.serve.options import ServeOptions


@pytest.mark.parametrize("given", ["--tp-size 2", "--tp-size=2", "--tp-size"])
def test_a_flag_with_another_name_is_told_by_that(given: str) -> None:
    said = "^--tp-size is not a flag here: the same is set by --tensor-parallel-size$"
    with pytest.raises(ConfigError, match=said):
        cli.parse(["generate", "--model", "m", *given.split()])
    with pytest.raises(ConfigError, match=said):
        parse_serve(["m", *given.split()])


def test_a_flag_for_what_is_always_so_is_to_be_left_out() -> None:
    said = "^--enable-chunked-prefill is not a flag here, leave it out: prompts are always cut"
    with pytest.raises(ConfigError, match=said):
        parse_serve(["m", "--enable-chunked-prefill"])


def test_a_flag_for_what_is_not_here_says_so() -> None:
    said = "^-q is not a flag here: arithmetic is in --dtype, to which weights of a GGUF file"
    with pytest.raises(ConfigError, match=said):
        parse_serve(["m", "-q", "awq"])


def test_every_flag_is_answered_on_the_command_line() -> None:
    for flag in {*SAME, *NEEDLESS, *ABSENT}:
        given = f"{flag}level=3" if flag.endswith(".") else flag
        name = re.escape(given.partition("=")[0])
        with pytest.raises(ConfigError, match=f"^{name} is not a flag here[:,] "):
            parse_serve(["m", given])


@pytest.mark.parametrize("given", ["-O.level=3", "-cc.mode=3", "--compilation-config.mode=3"])
def test_keys_of_a_group_of_flags_are_told_by_their_group(given: str) -> None:
    name = given.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{name} is not a flag here: the same is set by --cuda"):
        parse_serve(["m", given])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pipeline_parallel_size", ": a model is split by tensor_parallel_size alone"),
        ("trust_remote_code", ", leave it out: code of a model is never run"),
        ("disable_overlap_schedule", ": the same is set by async_scheduling=False"),
    ],
)
def test_python_and_files_are_answered_alike(name: str, said: str, tmp_path: Path) -> None:
    whole = f"{name} is not a setting here{said}$"
    with pytest.raises(ConfigError, match=f"^{whole}"):
        LLM("m", **{name: 2})
    file = tmp_path / "lockstep.toml"
    file.write_text(f"{name.replace('_', '-')} = 2\n")
    with pytest.raises(ConfigError, match=f"lockstep.toml: {whole}"):
        parse_serve(["m", "--config", str(file)])


def test_other_complaints_stay_as_they_are() -> None:
    assert advice("unrecognized arguments: --modle x") is None
    assert advice("argument --seed: invalid int value: 'x'") is None


def test_advice_names_flags_that_there_are_and_none_of_these() -> None:
    fields = (*LaunchConfig.__struct_fields__, *ServeOptions.__struct_fields__)
    known = {"--" + name.replace("_", "-") for name in fields}
    texts = " ".join([*SAME.values(), *NEEDLESS.values(), *ABSENT.values()])
    named = {word.strip(",").replace("--no-", "--") for word in texts.split() if word[:2] == "--"}
    assert named and named <= known
    assert not known & {*SAME, *NEEDLESS, *ABSENT}
    assert len({*SAME, *NEEDLESS, *ABSENT}) == len(SAME) + len(NEEDLESS) + len(ABSENT)
