"""What can go wrong with captured graphs; each error says at which descriptor."""


class GraphError(RuntimeError):
    """A graph cannot be captured or replayed."""


class CaptureFailed(GraphError):
    """The captured code raised; that error is the cause.

    Nothing is cleaned up over ranks, the communicators it used are broken, and torch keeps parts of
    the broken capture (its random generator, for one): the process is to end.
    """


class StaleGraphError(GraphError):
    """A graph would read tensors that are no longer where they were when it was captured."""


class HostSync(GraphError):
    """The captured code asks the device for a value, which a graph has no moment for."""


class OutsidePool(GraphError):
    """The captured code uses memory that the graph does not own, or gives away what it owns."""
