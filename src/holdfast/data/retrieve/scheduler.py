"""Which link is next: so many at once, so many a host, and no host waits for another's turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from holdfast.data.retrieve.net import host_of
from holdfast.data.retrieve.shards import Wanted

_LOOKAHEAD = 20_000  # rows held back so that one busy host does not keep the others waiting


class ByHost:
    """Runs ``work`` on every row within the two limits; the first exception stops it all and is raised."""

    def __init__(
        self,
        rows: Iterator[Wanted],
        work: Callable[[Wanted], Coroutine[Any, Any, None]],
        concurrency: int,
        per_host: int,
    ) -> None:
        self._rows, self._work, self._concurrency, self._per_host = rows, work, concurrency, per_host
        self._queues: dict[str, deque[Wanted]] = {}
        self._active = Counter[str]()
        self._ready: deque[str] = deque()  # hosts with a row waiting and a free place; each at most once
        self._listed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished = asyncio.Event()
        self._held = 0
        self._exhausted = False
        self._stopped = False
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Until every row is done, or one has failed."""
        self._start()
        try:
            await self._finished.wait()
        finally:
            self._stopped = True
            under_way = tuple(self._tasks)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def _offer(self, host: str) -> None:
        if host not in self._listed and self._queues.get(host) and self._active[host] < self._per_host:
            self._listed.add(host)
            self._ready.append(host)

    def _admit(self) -> None:
        while self._held < _LOOKAHEAD and not self._exhausted:
            row = next(self._rows, None)
            if row is None:
                self._exhausted = True
                break
            host = host_of(row.url)
            self._queues.setdefault(host, deque()).append(row)
            self._held += 1
            self._offer(host)

    def _start(self) -> None:
        self._admit()
        while self._ready and len(self._tasks) < self._concurrency and not self._stopped:
            host = self._ready.popleft()
            self._listed.discard(host)
            row = self._queues[host].popleft()
            self._held -= 1
            self._active[host] += 1
            task = asyncio.create_task(self._work(row))
            self._tasks.add(task)
            task.add_done_callback(lambda done, host=host: self._settle(done, host))
            self._offer(host)
        if not self._tasks:
            self._finished.set()

    def _settle(self, task: asyncio.Task[None], host: str) -> None:
        self._tasks.discard(task)
        self._active[host] -= 1
        if not self._queues[host] and not self._active[host]:
            del self._queues[host], self._active[host]
        if self._failure is None and not task.cancelled() and (failure := task.exception()) is not None:
            self._failure, self._stopped = failure, True
            self._finished.set()  # the others are not waited for: a host that never answers would hold up the error
        self._offer(host)
        self._start()
