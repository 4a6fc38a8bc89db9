"""When a server looks for garbage: in its whole heap only while nothing runs."""

import gc
import time

# Python's thresholds: the middle generation is walked after each walk of the young, all never.
_EACH, _NEVER = 0, 1 << 30
_WORTH_IT = 50
# A moment between two requests is no rest.
_QUIET_S = 1.0


class IdleCollector:
    """As a context it keeps Python from whole collections by itself.

    One walks everything that is alive: with a thousand open streams it takes a tenth of a second,
    and finds next to nothing. Nor does what is new gather for a long walk: it is walked twice at
    once, and then left alone. Calls leave no cycles behind, so little waits for a rest.
    """

    def __init__(self) -> None:
        self._quiet_since = time.monotonic()

    def __enter__(self) -> "IdleCollector":
        self._thresholds = gc.get_threshold()
        gc.set_threshold(self._thresholds[0], _EACH, _NEVER)
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
