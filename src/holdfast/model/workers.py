"""Threads of Python that compute with one thread of PyTorch each.

On a CPU a tower is a long row of short operations. Threads that share each of them wait for one another at the end of
every one, and where the machine has other work that is most of their time. Threads that take pictures of their own do
not meet until the set is done, and small passes stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def separate_threads(count: int) -> Generator[ThreadPoolExecutor]:
    """``count`` threads, in each of which PyTorch uses no other; in all other threads it uses what it used before."""
    shared = torch.get_num_threads()
    begun = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="tower", initializer=_compute_alone)
    try:
        for _ in range(count):
            pool.submit(begun.wait)  # none of them ends before all are there: as many threads begin
        begun.wait()
        torch.set_num_threads(shared)  # a thread's own number was set with the one that threads to come begin with
        yield pool
    finally:
        begun.abort()
        pool.shutdown(cancel_futures=True)


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread takes over the process's number when it first asks, and never again
    torch.set_num_threads(1)


def each_in_a_thread(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``function`` of every item, in their order: several at once, each computed by one thread alone.

    What an item ends in does not depend on how many threads there are.
    """
    enabled = torch.is_grad_enabled()  # a thread's own

    def computed(item: Item) -> Result:
        with torch.set_grad_enabled(enabled):
            return function(item)

    with separate_threads(max(1, min(len(items), torch.get_num_threads()))) as threads:
        return list(threads.map(computed, items))
