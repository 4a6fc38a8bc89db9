"""What can go wrong with captured graphs; each error says at which descriptor."""


class GraphError(RuntimeError):
    """A graph cannot be captured or replayed."""


class CaptureFailed(GraphError):
    """The captured code raised; that error is the cause. Nothing was done to clean up over ranks,
    and the communicators it used are not to be used again."""


class StaleGraphError(GraphError):
    """A graph would read tensors that are no longer where they were when it was captured."""
