"""Files that a command is told to write, checked before work begins."""

import os
from pathlib import Path

from lockstep.launcher.errors import ConfigError


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ConfigError: names the flag and the file.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: it cannot be written")
