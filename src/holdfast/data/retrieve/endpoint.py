"""A judge behind an OpenAI-compatible endpoint: many questions at once, each asked once, none lost, within a budget."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from holdfast.data.retrieve.answers import MOST_TOKENS, Answer, AnswerCache
from holdfast.data.retrieve.budget import Budget, CapReached, most_tokens
from holdfast.data.retrieve.net import host_of
from holdfast.data.retrieve.question import Question, tidy_caption
from holdfast.data.retrieve.secret import ApiKey
from holdfast.errors import HoldfastError, UserError

Progress = Callable[[int, int], None]

_LONGEST_ANSWER = 1 << 20  # bytes of a response
_CHUNK = 1 << 16
_LONGEST_WAIT = 300.0  # seconds
_TEMPLATE_TOKENS = 64  # what an endpoint puts around the messages
_NO_USE_ASKING_AGAIN = (400, 401, 403, 404, 405, 413, 422)
_TURNED_AWAY = (429, 503)


@dataclass(frozen=True)
class EndpointConfig:
    """Where the judge is, and how hard to press it."""

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 16
    attempts: int = 5
    timeout_seconds: float = 60.0
    first_wait_seconds: float = 1.0  # doubles with every attempt
    answer_tokens: int = 400  # the longest answer that is asked for
    price_in: float = 0.0  # a million tokens
    price_out: float = 0.0
    max_requests: int = 100_000  # of one run, repeated ones included
    max_tokens: int = 50_000_000  # of one run, asked and answered

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or not host_of(self.url):
            raise UserError(f"--judge-url got {self.url!r}", expected="an http(s) address such as http://HOST:PORT/v1")
        if self.concurrency < 1 or self.attempts < 1 or self.timeout_seconds <= 0:
            raise UserError("--judge-concurrency, --judge-attempts and --judge-timeout must be above 0")
        if self.max_requests < 1 or self.max_tokens < 1:
            raise UserError("--max-requests and --max-tokens must be above 0")

    @property
    def address(self) -> str:
        """The address of chat completions, whether or not the user wrote it out."""
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"


class _Temporary(Exception):  # noqa: N818
    """The endpoint may answer the next time. ``wait`` is what it asked for, in seconds."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        self.problem, self.wait = problem, wait
        super().__init__(problem)


class _Unread(_Temporary):
    """There was no connection, or the endpoint turned the question away: it cost nothing."""


@dataclass(frozen=True)
class _Reply:
    """What came back: a text, and the tokens that the endpoint says it cost (None where it does not say)."""

    text: str
    tokens: tuple[int, int] | None


def ask_all(
    captions: Iterable[str],
    question: Question,
    config: EndpointConfig,
    cache: AnswerCache,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Ask about every caption that has no answer yet. Returns the captions that got none, with the last problem.

    Stops with an error that says what is left where the next question would go beyond a cap.
    """
    wanted = list(dict.fromkeys(captions))
    open_captions = [caption for caption in wanted if cache.get(caption) is None]
    if not open_captions:
        return {}
    asker = _Asker(question, config, cache)
    unanswered, stopped_by = asyncio.run(asker.ask(open_captions, progress))
    if stopped_by is not None:
        left = sum(cache.get(caption) is None for caption in wanted)
        raise asker.cap_error(stopped_by, len(wanted) - left, left)
    return unanswered


class _Asker:
    """One run of questions: the key, the budget and the cache that they share."""

    def __init__(self, question: Question, config: EndpointConfig, cache: AnswerCache) -> None:
        self._question, self._config, self._cache = question, config, cache
        self._key = ApiKey.from_environment(config.key_variable)
        self._budget = Budget(config.max_requests, config.max_tokens)

    async def ask(self, captions: list[str], progress: Progress | None) -> tuple[dict[str, str], CapReached | None]:
        """Ask about each caption: those without an answer, and the cap that stopped it, if one did."""
        unanswered: dict[str, str] = {}
        stopped: list[CapReached] = []
        waiting = iter(captions)
        settled = 0

        async def work(session: aiohttp.ClientSession) -> None:
            nonlocal settled
            for caption in waiting:
                try:
                    self._cache.put(caption, await self._answer(session, caption))
                except _Temporary as problem:
                    unanswered[caption] = problem.problem
                except CapReached as cap:
                    stopped.append(cap)
                    return  # requests under way finish: they are paid for
                settled += 1
                if progress is not None:
                    progress(settled, len(captions))

        async with self._session() as session:
            tasks = [asyncio.create_task(work(session)) for _ in range(min(self._config.concurrency, len(captions)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return unanswered, stopped[0] if stopped else None

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **self._key.headers()},
            auto_decompress=False,  # a small body could become a large one
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_seconds),
            connector=aiohttp.TCPConnector(limit=self._config.concurrency),
        )

    async def _answer(self, session: aiohttp.ClientSession, caption: str) -> Answer:
        """Ask until an answer can be read; :class:`_Temporary` when the attempts are used up."""
        problem = _Temporary("never asked")
        for attempt in range(self._config.attempts):
            if attempt:
                pause = self._config.first_wait_seconds * 2 ** (attempt - 1)
                # Spread out, so that requests that failed together do not come back together.
                await asyncio.sleep(max(problem.wait or 0.0, pause * random.uniform(0.75, 1.25)))
            try:
                reply = await self._within_budget(session, caption, attempt)
            except _Temporary as failed:
                problem = failed
                continue
            tokens_in, tokens_out = reply.tokens or (0, 0)
            verdict = self._question.read(reply.text, caption, self._key.hide)
            if verdict is not None:
                return Answer(verdict, tokens_in, tokens_out)
            self._cache.waste(tokens_in, tokens_out)
            problem = _Temporary("no verdict in the answer")
        raise problem

    async def _within_budget(self, session: aiohttp.ClientSession, caption: str, attempt: int) -> _Reply:
        """One request, if it may be sent. What it cost is what the endpoint says, or else what it may have cost."""
        messages = self._question.messages(caption)
        asked = _TEMPLATE_TOKENS + sum(most_tokens(message["content"]) for message in messages)
        spent = at_worst = asked + self._config.answer_tokens
        await self._budget.reserve(at_worst)
        try:
            reply = await self._request(session, messages, attempt)
            spent = sum(reply.tokens) if reply.tokens is not None else asked + most_tokens(reply.text)
            return reply
        except _Unread:
            spent = 0
            raise
        finally:
            self._budget.settle(at_worst, spent)

    async def _request(self, session: aiohttp.ClientSession, messages: list[dict[str, str]], attempt: int) -> _Reply:
        body = {
            "model": self._config.model,
            "messages": messages,
            # A second try at temperature 0 would say the same unreadable thing.
            "temperature": 0 if attempt == 0 else 0.3,
            "max_tokens": self._config.answer_tokens,
        }
        try:
            async with session.post(self._config.address, json=body, allow_redirects=False) as response:
                content = await _read_body(response)
                status, wait = response.status, response.headers.get("Retry-After", "")
        except aiohttp.ClientConnectorError as error:
            raise _Unread(type(error).__name__) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _Temporary(type(error).__name__) from error
        if status in _NO_USE_ASKING_AGAIN:
            raise UserError(
                f"the judge refused the question with status {status}",
                found=tidy_caption(self._key.hide(content.decode("utf-8", "replace")))[:300],
                do=f"check --judge-url, --judge-model and the key in {self._config.key_variable}; "
                "answers so far are kept",
            )
        if status in _TURNED_AWAY:
            raise _Unread(f"http-{status}", _seconds(wait))
        if status != 200:
            raise _Temporary(f"http-{status}", _seconds(wait))
        return _read_completion(content)

    def cap_error(self, cap: CapReached, judged: int, left: int) -> HoldfastError:
        """What the command says when it stops at a cap."""
        budget = self._budget
        if not budget.requests:
            return UserError(
                f"--max-tokens {budget.max_tokens:,} does not allow a single question",
                expected=f"{cap.needed:,} or more: a token for each byte of the question, and the longest answer",
                do="raise it; most questions cost a fraction of that, and what they leave is used for others",
            )
        return HoldfastError(
            f"the judge stopped at {cap.option}: {judged:,} captions are judged, {left:,} are left",
            found=f"{budget.requests:,} requests and at most {budget.tokens:,} tokens in this run",
            do=f"run the same command again to go on with the rest, with a larger {cap.option} to go further at once; "
            f"what was judged is kept in {self._cache.path}",
        )


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """The body of a response, if it is as it was asked for; of an error the beginning is enough."""
    is_answer = response.status == 200
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        if is_answer:
            raise _Temporary("a compressed answer")
        return b"(compressed)"
    content = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        content += chunk
        if len(content) > _LONGEST_ANSWER:
            if is_answer:
                raise _Temporary("an endless answer")
            break
    return bytes(content)


def _seconds(text: str) -> float | None:
    """How long an endpoint asks to be left alone, within reason; None for what is no number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return min(seconds, _LONGEST_WAIT) if seconds >= 0 else None


def _read_completion(content: bytes) -> _Reply:
    """Text and token counts of a chat completion; anything else is worth another try."""
    try:
        value = json.loads(content)
        text = value["choices"][0]["message"]["content"]
        usage = value.get("usage")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Temporary("not a chat completion") from error
    except RecursionError as error:
        raise _Temporary("an answer that is nested too deeply") from error
    if not isinstance(text, str):
        raise _Temporary("an answer without text")
    return _Reply(text, _read_usage(usage))


def _read_usage(usage: Any) -> tuple[int, int] | None:
    """Tokens asked and answered; None where an endpoint does not say, or says what cannot be."""
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    tokens = [count for count in counts if type(count) is int and 0 <= count <= MOST_TOKENS]
    return (tokens[0], tokens[1]) if len(tokens) == 2 else None


def unanswered_error(unanswered: dict[str, str]) -> HoldfastError:
    """What the command says when the endpoint left questions open."""
    reasons = sorted({problem: list(unanswered.values()).count(problem) for problem in unanswered.values()}.items())
    return HoldfastError(
        f"{len(unanswered)} captions got no answer from the judge",
        found=", ".join(f"{reason}: {count}" for reason, count in reasons),
        do="run the same command again: the answers so far are kept; or drop those captions with --drop-unanswered",
    )
