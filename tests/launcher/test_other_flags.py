"""Flags that users of other servers try: what to write instead, or why nothing is needed."""

import pytest

from lockstep.launcher import cli
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.other_flags import NEEDLESS, SAME, advice
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


def test_other_complaints_stay_as_they_are() -> None:
    assert advice("unrecognized arguments: --modle x") is None
    assert advice("argument --seed: invalid int value: 'x'") is None


def test_advice_names_flags_that_there_are_and_none_of_these() -> None:
    fields = (*LaunchConfig.__struct_fields__, *ServeOptions.__struct_fields__)
    known = {"--" + name.replace("_", "-") for name in fields}
    texts = " ".join([*SAME.values(), *NEEDLESS.values()])
    named = {word.strip(",") for word in texts.split() if word.startswith("--")}
    assert named and named <= known
    assert not known & {*SAME, *NEEDLESS}
