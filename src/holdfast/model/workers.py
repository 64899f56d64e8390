"""Threads of Python that compute with one thread of PyTorch each.

On a CPU a tower is a long row of short operations. Threads that share each of them wait for one another at the end of
every one, and where the machine has other work that is most of their time. Threads that take pictures of their own do
not meet until the set is done, and small passes stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import torch


@contextmanager
def separate_threads(count: int) -> Generator[ThreadPoolExecutor]:
    """``count`` threads, in each of which PyTorch uses no other; in all other threads it uses what it used before."""
    shared = torch.get_num_threads()
    begun = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="tower", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for _ in range(count):
            pool.submit(begun.wait)  # none of them ends before all are there: as many threads begin
        begun.wait()
        torch.set_num_threads(shared)  # a thread's own number was set with the one that threads to come begin with
        yield pool
    finally:
        begun.abort()
        pool.shutdown(cancel_futures=True)
