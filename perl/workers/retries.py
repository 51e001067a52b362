"""Requests that a worker held when it died are tried again, in groups that get smaller.

A lost device takes innocent requests with it, and a request that crashes the engine takes its neighbours with it. So
the requests are halved, and each half goes to a worker that has nothing else; a half that kills its worker is halved
again. A request that kills twice, alone, has failed. Requests of one prompt stay together until no other prompt is
left: when two of them have failed, so have the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from perl.workers.worker import Request, RequestId

TWICE_ALONE = "it killed its worker twice, alone"
SIBLINGS = "two other completions of this prompt killed their workers; not tried"


class Retries:
    """The groups that wait, and the requests that have failed."""

    def __init__(self):
        self.failed: dict[RequestId, str] = {}
        """Why, in the words of the record's `error`."""
        self._groups: deque[list[Request]] = deque()
        self._killed: dict[RequestId, int] = {}
        """Index of the worker that a request alone has killed."""
        self._failures: Counter[RequestId] = Counter()
        """Requests that have failed, by prompt."""

    def bisect(self, worker: int, requests: Sequence[Request], reason: str) -> None:
        """`worker` died for this reason, holding `requests`."""
        if len(requests) > 1:
            self._groups.extend(halves(requests))
        elif requests and requests[0].id not in self._killed:
            self._killed[requests[0].id] = worker
            self._groups.append(list(requests))
        elif requests:
            self.failed[requests[0].id] = f"{TWICE_ALONE}; the last time: {reason}"
            self._failures[requests[0].prompt_id] += 1

    def take(self, worker: int, only: bool) -> list[Request]:
        """A group for `worker` to try; empty: none waits. A request that has killed this very worker waits for another
        one, unless it is the `only` worker: one bad device is not enough to fail a request."""
        for _ in range(len(self._groups)):
            group = self.without_failed(self._groups.popleft())
            if group and (only or len(group) > 1 or self._killed.get(group[0].id) != worker):
                return group
            if group:
                self._groups.append(group)
        return []

    def without_failed(self, requests: Sequence[Request]) -> list[Request]:
        """Those to be tried; the others have failed with their prompt."""
        hopeless = [request for request in requests if self._failures[request.prompt_id] >= 2]
        self.failed |= {request.id: SIBLINGS for request in hopeless}
        return [request for request in requests if request.id not in self.failed]


def halves(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Half the prompts each; of one prompt's requests, the first alone and the others."""
    prompts = list(dict.fromkeys(request.prompt_id for request in requests))
    first = set(prompts[: len(prompts) // 2])
    if not first:
        return [requests[0]], list(requests[1:])
    return [r for r in requests if r.prompt_id in first], [r for r in requests if r.prompt_id not in first]
