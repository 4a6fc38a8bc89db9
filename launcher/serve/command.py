"""The command line of ``lockstep serve``."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import LaunchConfig, build_config, read_toml
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.front_end import StartEngine
from lockstep.launcher.serve.cross_origin import LISTS, add_list_flags
from lockstep.launcher.serve.options import ServeOptions
from lockstep.launcher.serve.run import serve
from lockstep.launcher.strict import convert

KEY_VARIABLE = "LOCKSTEP_API_KEY"


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked command line."""

    launch: LaunchConfig
    options: ServeOptions


def main(argv: Sequence[str], start_engine: StartEngine) -> int:
    """Raises LaunchError: the server cannot start, or has failed."""
    command = parse(argv)
    return serve(command.launch, command.options, start_engine)


def parse(argv: Sequence[str]) -> ServeCommand:
    """Read flags, and the TOML file they name, which may hold settings of both kinds.

    Raises:
        ConfigError: settings that cannot work; names the field, the value and the limit.
        SystemExit: help was asked for.
    """
    namespace = _parser().parse_args(argv)
    settings = read_toml(Path(namespace.config), ServeOptions) if namespace.config else {}
    known = ServeOptions.__struct_fields__
    server = {name: settings.pop(name) for name in known if name in settings}
    server |= flags.given(namespace, ServeOptions)
    if "api_key" not in server and os.environ.get(KEY_VARIABLE):
        server["api_key"] = [os.environ[KEY_VARIABLE]]
    _check_one_address(server)
    engine = settings | flags.given(namespace, LaunchConfig) | _model(namespace)
    return ServeCommand(launch=build_config(engine), options=_options(server))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        allow_abbrev=False,
        prog="lockstep serve",
        description="Answer requests over HTTP, in the shapes of OpenAI's API.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    server = parser.add_argument_group("server")
    flags.add_flags(server, ServeOptions, skip=LISTS)
    add_list_flags(server)
    flags.add_flags(parser.add_argument_group("engine"), LaunchConfig)
    return parser


def _model(namespace: argparse.Namespace) -> dict[str, Any]:
    if namespace.model_tag is None:
        return {}
    if "model" in namespace:
        raise ConfigError(f"model is given twice: {namespace.model_tag!r} and --model")
    return {"model": namespace.model_tag}


def _check_one_address(given: dict[str, Any]) -> None:
    for name in ("host", "port"):
        if "uds" in given and name in given:
            values = f"{given['uds']!r} and {given[name]!r}"
            raise ConfigError(f"uds and {name} exclude each other, got {values}")


def _options(settings: dict[str, Any]) -> ServeOptions:
    try:
        return convert(settings, ServeOptions)
    except ValueError as error:
        raise ConfigError(str(error)) from None
