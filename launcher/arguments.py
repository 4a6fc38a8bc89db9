"""A command's parser whose complaints are one line."""

import argparse
from typing import NoReturn

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.other_flags import advice


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError: the message names the flag, the value and what it may be."""
        raise ConfigError(advice(message) or message)
