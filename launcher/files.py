"""Files that a command is told to read or write, checked before work begins."""

import os
from pathlib import Path

from lockstep.launcher.errors import ConfigError


def check_readable(flag: str, path: Path) -> None:
    """Refuse what is no file; a pipe is one.

    Raises:
        ConfigError: names the flag and the file.
    """
    if not path.exists():
        raise ConfigError(f"{flag} {path}: there is no such file")
    _refuse_folder(flag, path)


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ConfigError: names the flag and the file.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist")
    _refuse_folder(flag, path)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: it cannot be written")


def _refuse_folder(flag: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: it is a folder")
