"""What one run of the judge may spend: a number of requests, and a number of tokens."""

from __future__ import annotations

import asyncio


class CapReached(Exception):  # noqa: N818 - a stop that was asked for
    """A request of ``needed`` tokens at worst would go beyond a cap, which the command line calls ``option``."""

    def __init__(self, option: str, needed: int) -> None:
        self.option, self.needed = option, needed
        super().__init__(option)


def most_tokens(text: str) -> int:
    """A number of tokens that no tokenizer exceeds: each token stands for a byte at least."""
    return len(text.encode())


class Budget:
    """Requests and tokens spent so far, and those that requests under way may still cost.

    A request is sent only if its cost at worst fits beside that of all others under way: no cap is ever exceeded, and
    a request that does not fit yet waits until the others have cost less than they might have.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = self.tokens = 0
        self._held = self._under_way = 0
        self._settled = asyncio.Event()

    async def reserve(self, tokens: int) -> None:
        """Return when a request of ``tokens`` at worst may be sent; :class:`CapReached` when none ever may."""
        while True:
            if self.requests >= self.max_requests:
                raise CapReached("--max-requests", tokens)
            if self.tokens + self._held + tokens <= self.max_tokens:
                break
            if not self._under_way:
                raise CapReached("--max-tokens", tokens)
            self._settled.clear()
            await self._settled.wait()
        self.requests += 1
        self._under_way += 1
        self._held += tokens

    def settle(self, reserved: int, spent: int) -> None:
        """A request that had reserved ``reserved`` is over and cost ``spent``."""
        self._under_way -= 1
        self._held -= reserved
        self.tokens += spent
        self._settled.set()
