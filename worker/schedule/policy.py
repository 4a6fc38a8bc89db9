"""Choices that have alternatives: replica, order of admission, victim, deferral of prefills."""

from collections.abc import Iterable, Iterator, Sequence

from lockstep.worker.request import Request

# A request that does not fit may be passed by this many later ones, then it is passed no more.
MAX_PASSED = 32
# How far down a queue a pass looks for requests that fit.
SKIP_WINDOW = 64
# From this many preemptions on, a request waits until it can be served without another one.
RESERVE_AFTER = 2
# Output tokens that a request is charged for at most: most end long before their limit.
OUTPUT_CHARGE = 256


class LoadBalancer:
    """Shares requests out to replicas by the tokens, then the requests, that each is charged."""

    def __init__(self, num_replicas: int) -> None:
        self.tokens = [0] * num_replicas
        self.requests = [0] * num_replicas
        self._first = 0

    def place(self, request: Request) -> int:
        """Charge the least loaded replica with a request; ties are taken in turn."""
        size = len(self.tokens)
        turn = [(self._first + offset) % size for offset in range(size)]
        replica = min(turn, key=lambda each: (self.tokens[each], self.requests[each]))
        self._first = (replica + 1) % size
        request.replica = replica
        request.charge = request.num_prompt_tokens + min(request.max_outputs, OUTPUT_CHARGE)
        self._add(request, 1)
        return replica

    def credit(self, request: Request) -> None:
        """Take a request off its replica's account, however it ended."""
        self._add(request, -1)

    def _add(self, request: Request, sign: int) -> None:
        self.tokens[request.replica] += sign * request.charge
        self.requests[request.replica] += sign


def in_reach(waiting: Iterable[Request]) -> Iterator[Request]:
    """Requests that may be tried now, oldest first: a window that ends at one passed too often."""
    for request, _ in zip(waiting, range(SKIP_WINDOW), strict=False):
        yield request
        if request.passed >= MAX_PASSED:
            return


def choose_victim(running: Sequence[Request], preempt: str, step: int) -> Request:
    """Whom a full pool preempts: never by choice one that waited for its reserve.

    "youngest" keeps the order of arrival; "least_computed" throws least work away.
    """

    def cost(request: Request) -> tuple[bool, int, int]:
        computed = request.num_planned_by(step) if preempt == "least_computed" else 0
        return request.num_preemptions >= RESERVE_AFTER, computed, -request.arrival

    return min(running, key=cost)


class PrefillAlignment:
    """Decides when the replicas of a lockstep group prefill, since one drags all out of graphs.

    A prompt waits for prompts of the other replicas for at most ``max_defer_steps`` steps. A
    prompt once begun goes on, and others join it at any step.
    """

    def __init__(self, max_defer_steps: int) -> None:
        self._max = max_defer_steps
        self._deferred = 0

    def allow(self, wants: Sequence[bool], begun: Sequence[bool], decodes: Sequence[bool]) -> bool:
        """Whether this step may prefill.

        Per replica: whether a prompt could be computed, one is begun, and lanes decode.
        """
        drags = any(decode and not want for want, decode in zip(wants, decodes, strict=True))
        if any(wants) and drags and not any(begun) and self._deferred < self._max:
            self._deferred += 1
            return False
        self._deferred = 0
        return True
