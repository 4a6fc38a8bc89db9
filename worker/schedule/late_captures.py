"""Which graphs of a lockstep group exist, and when the next is captured between steps (pure)."""

from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.manifest import Manifest

# While requests run, so many steps come between two captures: each holds them up.
STEPS_BETWEEN = 16


class LateCaptures:
    """The late entries of a manifest, in its order.

    ``dispatcher`` knows the graphs that exist once all plans so far are carried out.
    """

    def __init__(self, dispatcher: Dispatcher, manifest: Manifest) -> None:
        self._whole = dispatcher
        self._descriptors = [entry.descriptor for entry in manifest.entries]
        self._next = len(manifest.early)
        self._due_step = STEPS_BETWEEN
        self.dispatcher = self._existing()

    @property
    def num_left(self) -> int:
        return len(self._descriptors) - self._next

    def due(self, step_id: int) -> bool:
        """True if a busy group is to capture instead of taking step ``step_id``."""
        return self.num_left > 0 and step_id >= self._due_step

    def take(self, step_id: int) -> int:
        """The next entry's place in the manifest; its plan has this ``step_id``."""
        position = self._next
        self._next += 1
        self._due_step = step_id + 1 + STEPS_BETWEEN
        self.dispatcher = self._existing()
        return position

    def _existing(self) -> Dispatcher:
        return self._whole.only(self._descriptors[: self._next]) if self.num_left else self._whole
