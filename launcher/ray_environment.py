"""What Ray would otherwise choose by itself. It reads its environment when it is imported."""

import secrets
from collections.abc import MutableMapping
from pathlib import Path


def set_ray_defaults(env: MutableMapping[str, str]) -> None:
    """Set what the user has not: no usage statistics, and how connections are authenticated."""
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    env.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_AUTH_MODE" not in env:
        _choose_authentication(env)


def _choose_authentication(env: MutableMapping[str, str]) -> None:
    """A token wherever there is one, and always for an own cluster, which the network can reach.

    Its token is drawn here and lives in memory: a file, as Ray would write, switches
    authentication on for clusters started by others later.
    """
    has_token = (
        "RAY_AUTH_TOKEN" in env
        or "RAY_AUTH_TOKEN_PATH" in env
        or (Path.home() / ".ray" / "auth_token").exists()
    )
    joins = "RAY_ADDRESS" in env
    env["RAY_AUTH_MODE"] = "disabled" if joins and not has_token else "token"
    if not joins and not has_token:
        env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
