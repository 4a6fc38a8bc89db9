"""When a server walks its whole heap for garbage: while nothing runs."""

import gc
import time

# Whole collections start by themselves after so many of the middle generation: never.
_NEVER = 1 << 30
_WORTH_IT = 10
# A moment between two requests is no rest.
_QUIET_S = 1.0


class IdleCollector:
    """As a context it keeps Python from whole collections by itself.

    One walks everything that is alive: with a thousand open streams it takes a tenth of a second,
    and finds next to nothing. Young garbage is collected as ever.
    """

    def __init__(self) -> None:
        self._quiet_since = time.monotonic()

    def __enter__(self) -> "IdleCollector":
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.set_threshold(*self._thresholds)

    def note(self, num_calls: int) -> None:
        """So many calls are in the server. Collects once none has been for a while."""
        now = time.monotonic()
        if num_calls:
            self._quiet_since = now
        elif now - self._quiet_since >= _QUIET_S and gc.get_count()[2] >= _WORTH_IT:
            gc.collect()
