"""How a command ends at a SIGTERM."""

from types import FrameType
from typing import NoReturn


class Termination:
    """Handler of SIGTERM that leaves by way of the finally blocks, which end the engine.

    It raises what an interrupt raises: Ray's calls turn a SystemExit into an exit code of theirs.
    """

    came = False

    def __call__(self, signum: int, frame: FrameType | None) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt
