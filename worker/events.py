"""Points in a device's work, so that a host can look without waiting."""

import torch


class DeviceEvent:
    """The last recorded point of the current stream. On a CPU it has always passed."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block the host until it has passed; at once if nothing was recorded."""
        if self._event is not None:
            self._event.synchronize()
