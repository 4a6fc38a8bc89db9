"""How long loads tell how far they are. No torch: the launcher fetches models without it."""

from collections.abc import Callable

# (stage, done, total): what is being done, how far it is, and how far it will go.
Progress = Callable[[str, int, int], None]
