"""What every benchmark that starts an engine is asked, and how its command line is read."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import Count, LaunchConfig, build_config
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.files import check_writable
from lockstep.launcher.strict import convert, suggestion
from lockstep.worker.config import GraphModeName

TIMESTAMPS = 4096
_MODES: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}} | {
    name.lower(): {"cudagraph_mode": name} for name in get_args(GraphModeName) if name != "NONE"
}


def described(text: str) -> Meta:
    """The help text of a flag."""
    return Meta(description=text)


class EngineBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags beside those of an engine.

    Raises:
        ValueError: flags that need or exclude each other, or an unknown mode.
    """

    repetitions: Annotated[Count, described("of each row")] = 5
    modes: Annotated[
        str,
        described("graph modes in turn, such as eager,full_and_piecewise (default: the engine's)"),
    ] = ""
    ray: Annotated[bool, described("ranks as Ray actors; else as child processes")] = True
    compare_no_ray: Annotated[bool, described("first with Ray, then without")] = False
    json: Annotated[str | None, described("write all of it there")] = None

    def __post_init__(self) -> None:
        if self.compare_no_ray and not self.ray:
            raise ValueError("compare_no_ray needs a run with Ray to compare with, got --no-ray")
        for name in self.mode_names:
            if name and name not in _MODES:
                raise ValueError(f"modes: {name!r} is not known{suggestion(name, list(_MODES))}")

    @property
    def launchers(self) -> tuple[str, ...]:
        """In the order of their runs."""
        return (("ray",) if self.ray else ()) + (
            ("processes",) if self.compare_no_ray or not self.ray else ()
        )

    @property
    def mode_names(self) -> tuple[str, ...]:
        """As ``EngineBenchCommand`` knows them; "" is whatever the engine is told."""
        return tuple(name.strip().lower() for name in self.modes.split(","))

    @property
    def starts(self) -> tuple[tuple[str, str], ...]:
        """(launcher, mode) of each engine, in the order of their runs."""
        return tuple(product(self.launchers, self.mode_names))


class EngineBenchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked command line, beside its options.

    ``engine`` are fields of ``LaunchConfig``.
    """

    engine: dict[str, Any]

    def launch(self, mode: str) -> LaunchConfig:
        """Settings of an engine in that graph mode. Raises ConfigError if they cannot work."""
        return build_config(self.engine | (_MODES[mode] if mode else {}))


AnyOptions = TypeVar("AnyOptions", bound=EngineBenchOptions)


def read_flags(
    argv: Sequence[str], name: str, summary: str, options: type[AnyOptions]
) -> tuple[AnyOptions, dict[str, Any]]:
    """The options of ``lockstep bench NAME``, and the fields of ``LaunchConfig`` that are given.

    Raises:
        ConfigError: an unknown flag, a file that cannot be written.
        ValueError: names the field, its value and the limit.
    """
    parser = Parser(prog=f"lockstep bench {name}", description=summary, allow_abbrev=False)
    flags.add_flags(parser, options)
    flags.add_flags(parser.add_argument_group("engine"), LaunchConfig)
    namespace = parser.parse_args(argv)
    asked = convert(flags.given(namespace, options), options)
    if asked.json is not None:
        check_writable("--json", Path(asked.json))
    given = flags.given(namespace, LaunchConfig)
    if "model" not in given:
        raise ValueError("model is required: pass --model")
    return asked, given


def flag_error(error: ValueError, options: type[AnyOptions]) -> ConfigError:
    """One line that names flags instead of fields."""
    named = flags.with_flags(flags.with_flags(str(error), options), LaunchConfig)
    return ConfigError(" ".join(named.split()))
