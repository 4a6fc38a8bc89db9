"""Stop strings over text that arrives in pieces."""


class StopStringMatcher:
    """Cuts a stream at the first stop string.

    Of several matches the one that ends first counts, and of those the longest, so the result does
    not depend on how the text was split. Only a suffix that can still become a stop is held back.

    Args:
        stops: non-empty strings.
        include_stop: leave the stop string in the text.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that may be shown now; after a match, ``matched`` is set and nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        self._held = ""
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            return text[: start + len(self.matched) if self._include_stop else start]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held suffix; no more text will come, so it is no stop."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(matches)[1:] if matches else None

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix that a stop begins with."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
