"""Is another process of this host still there?"""


def process_gone(pid: int) -> bool:
    """True if ``pid`` has ended, reaped or not. Same pid namespace only."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return True
    # The name may hold spaces and parentheses: the state stands after the last one.
    return stat.rpartition(b")")[2].split()[:1] in ([b"Z"], [b"X"])
