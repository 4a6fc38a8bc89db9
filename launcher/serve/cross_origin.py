"""What browsers let pages of other origins do with the server."""

import argparse

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from lockstep.launcher.serve.options import ServeOptions

LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")


def add_list_flags(parser: argparse._ActionsContainer) -> None:
    """Flags of ``LISTS``, each one JSON list, as vLLM takes them."""
    for name in LISTS:
        words = name.replace("_", " ")
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=_json_list, default=argparse.SUPPRESS,
            metavar="JSON", help=f'{words} of pages of browsers, as a list (default ["*"]: all)',
        )  # fmt: skip


def _json_list(text: str) -> list[str]:
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f"must be a JSON list of texts, got {text!r}") from None


def with_cors(app: ASGIApp, options: ServeOptions) -> ASGIApp:
    """``app`` behind answers to preflights, its own answers with the headers that pages need.

    It stands outside of everything else: a preflight has no key, and pages may read any error.
    """
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
    )
