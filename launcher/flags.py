"""Command-line flags made from the fields of a struct, so that each setting is written once."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from lockstep.launcher.whole_numbers import whole_number

ALIASES = {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
    "optimization_level": "-O",
    "max_num_queued_reqs": "--max-queued-requests",
}
_SCALARS: dict[type[inspect.Type], tuple[Callable[[str], object], str]] = {
    inspect.IntType: (whole_number, "N"),
    inspect.FloatType: (float, "X"),
    inspect.StrType: (str, "TEXT"),
}


def add_flags(
    parser: argparse._ActionsContainer,
    struct: type[msgspec.Struct],
    *,
    skip: Collection[str] = (),
    help: Mapping[str, str] | None = None,
) -> None:
    """One ``--flag-name`` a field. Flags that are not given leave nothing in the namespace.

    Args:
        parser: a parser or a group of one.
        struct: its fields' types and descriptions become types and help texts.
        skip: fields without a flag.
        help: help texts of fields that have no description.
    """
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if field.name not in skip:
            names = [f"--{field.name.replace('_', '-')}"]
            names += [ALIASES[field.name]] if field.name in ALIASES else []
            text = (help or {}).get(field.name, "")
            parser.add_argument(*names, dest=field.name, **_options(field, text))


def given(namespace: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of ``struct`` that the command line set."""
    values = vars(namespace)
    return {name: values[name] for name in struct.__struct_fields__ if name in values}


def with_flags(message: str, struct: type[msgspec.Struct]) -> str:
    """Field names in an error as the flags that set them: max_num_seqs as --max-num-seqs.

    A name without an underscore is a word too, so it is a field only where the message begins.
    """
    names = struct.__struct_fields__
    anywhere = "|".join(name for name in names if "_" in name)
    pattern = rf"(?<![\w-])(?:{anywhere})(?![\w-])|^(?:{'|'.join(names)})(?=[: ])"
    return re.sub(pattern, lambda found: "--" + found[0].replace("_", "-"), message)


def _options(field: inspect.Field, text: str) -> dict[str, Any]:
    type_, description = _unwrap(field.type)
    # A text of the caller's stands alone: its default need not be the struct's.
    if not text and field.default not in (msgspec.NODEFAULT, None, ()):
        description = f"{description} (default {_shown(field.default)})".strip()
    shown = (text or description).replace("%", "%%")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": shown}
    if isinstance(type_, inspect.BoolType):
        return options | {"action": argparse.BooleanOptionalAction}
    if isinstance(type_, inspect.LiteralType):
        return options | _choice([str(value) for value in type_.values])
    if isinstance(type_, inspect.UnionType):
        # One text or several of them, which follow one flag.
        return options | {"action": "extend", "nargs": "+", "metavar": "TEXT"}
    if isinstance(type_, inspect.VarTupleType):
        return options | _repeated(_unwrap(type_.item_type)[0])
    return options | _scalar(type_)


def _choice(names: list[str]) -> dict[str, Any]:
    """One of these, in any case."""
    meant = {name.casefold(): name for name in names}
    return {"choices": names, "type": lambda text: meant.get(text.casefold(), text)}


def _repeated(item: inspect.Type) -> dict[str, Any]:
    """Numbers follow one flag; texts repeat the flag, so that they do not swallow prompts."""
    if isinstance(item, inspect.StrType):
        return {"action": "append", **_scalar(item)}
    return {"action": "extend", "nargs": "+", **_scalar(item)}


def _scalar(type_: inspect.Type) -> dict[str, Any]:
    kind, metavar = _SCALARS[type(type_)]
    return {"type": kind, "metavar": metavar}


def _unwrap(type_: inspect.Type) -> tuple[inspect.Type, str]:
    """The type behind its description and behind ``| None``."""
    text = ""
    if isinstance(type_, inspect.Metadata):
        text = str((type_.extra_json_schema or {}).get("description", ""))
        type_ = type_.type
    if isinstance(type_, inspect.UnionType):
        kinds = [t for t in type_.types if not isinstance(t, inspect.NoneType)]
        if len(kinds) > 1:
            return type_, text
        inner, more = _unwrap(kinds[0])
        return inner, text or more
    return type_, text


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return ("on" if default else "off") if isinstance(default, bool) else str(default)
