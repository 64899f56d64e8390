"""A judge behind an OpenAI-compatible endpoint: many questions at once, each asked once, none lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.artifacts import canonical_json, fingerprint_json
from holdfast.data.retrieve.question import Question, Verdict
from holdfast.errors import HoldfastError, UserError

Progress = Callable[[int, int], None]

_LONGEST_ANSWER = 1 << 20
_NO_USE_ASKING_AGAIN = (400, 401, 403, 404, 405, 413, 422)


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
    max_tokens: int = 400
    price_in: float = 0.0  # a million tokens
    price_out: float = 0.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"--judge-url got {self.url!r}", expected="an http(s) address such as http://HOST:PORT/v1")
        if self.concurrency < 1 or self.attempts < 1 or self.timeout_seconds <= 0:
            raise UserError("--judge-concurrency, --judge-attempts and --judge-timeout must be above 0")

    @property
    def address(self) -> str:
        """The address of chat completions, whether or not the user wrote it out."""
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"


@dataclass(frozen=True)
class Answer:
    """A verdict and what it cost."""

    verdict: Verdict
    tokens_in: int
    tokens_out: int


class AnswerCache:
    """Answers on disk, one JSON line each. A line cut short by a kill is dropped, and its question asked again."""

    def __init__(self, path: Path, config: EndpointConfig, question: Question) -> None:
        self._path = path
        self._scope = fingerprint_json([config.model, question.fingerprint()])[7:]
        self._known: dict[str, Answer] = {}
        self.lost: dict[str, int] = {"tokens_in": 0, "tokens_out": 0}  # answers that could not be read cost as well
        if not path.exists():
            return
        whole = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                entry = json.loads(line)
                if entry["scope"] == self._scope:
                    self._remember(entry)
        if whole != path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(whole)

    def _remember(self, entry: dict[str, Any]) -> None:
        if entry["caption"] is None:
            self.lost["tokens_in"] += entry["in"]
            self.lost["tokens_out"] += entry["out"]
        else:
            verdict = Verdict(entry["kept"], entry["reason"])
            self._known[entry["caption"]] = Answer(verdict, entry["in"], entry["out"])

    def get(self, caption: str) -> Answer | None:
        """The answer on this caption, if it was ever given."""
        return self._known.get(_digest(caption))

    def put(self, caption: str, answer: Answer) -> None:
        """Write an answer down before anything else happens to it."""
        verdict = answer.verdict
        self._append(_digest(caption), verdict.kept, verdict.reason, answer.tokens_in, answer.tokens_out)

    def waste(self, tokens_in: int, tokens_out: int) -> None:
        """Tokens of an answer that could not be read."""
        self._append(None, None, None, tokens_in, tokens_out)

    def _append(self, caption: str | None, kept: bool | None, reason: str | None, into: int, out: int) -> None:
        entry = {"scope": self._scope, "caption": caption, "kept": kept, "reason": reason, "in": into, "out": out}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(canonical_json(entry).encode() + b"\n")
        self._remember(entry)


def _digest(caption: str) -> str:
    return fingerprint_json(caption)[7:]


class _Temporary(Exception):  # noqa: N818
    """The endpoint may answer the next time. ``wait`` is what it asked for, in seconds."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        self.problem, self.wait = problem, wait
        super().__init__(problem)


def ask_all(
    captions: Iterable[str],
    question: Question,
    config: EndpointConfig,
    cache: AnswerCache,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Ask about every caption that has no answer yet. Returns the captions that got none, with the last problem."""
    open_captions = [one for one in dict.fromkeys(captions) if cache.get(one) is None]
    return asyncio.run(_ask_all(open_captions, question, config, cache, progress)) if open_captions else {}


async def _ask_all(
    captions: list[str], question: Question, config: EndpointConfig, cache: AnswerCache, progress: Progress | None
) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(config.key_variable)) else {}
    unanswered: dict[str, str] = {}
    waiting = iter(captions)
    settled = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal settled
        for caption in waiting:
            try:
                cache.put(caption, await _ask(session, caption, question, config, cache))
            except _Temporary as problem:
                unanswered[caption] = problem.problem
            settled += 1
            if progress is not None:
                progress(settled, len(captions))

    timeout = aiohttp.ClientTimeout(total=config.timeout_seconds)
    connector = aiohttp.TCPConnector(limit=config.concurrency)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        tasks = [asyncio.create_task(work(session)) for _ in range(min(config.concurrency, len(captions)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return unanswered


async def _ask(
    session: aiohttp.ClientSession, caption: str, question: Question, config: EndpointConfig, cache: AnswerCache
) -> Answer:
    """Ask until an answer can be read; :class:`_Temporary` when the attempts are used up."""
    problem = _Temporary("never asked")
    for attempt in range(config.attempts):
        if attempt:
            pause = config.first_wait_seconds * 2 ** (attempt - 1)
            # Spread out, so that requests that failed together do not come back together.
            await asyncio.sleep(max(problem.wait or 0.0, pause * random.uniform(0.75, 1.25)))
        try:
            text, tokens_in, tokens_out = await _request(session, caption, question, config, attempt)
        except _Temporary as failed:
            problem = failed
            continue
        verdict = question.read(text, caption)
        if verdict is not None:
            return Answer(verdict, tokens_in, tokens_out)
        cache.waste(tokens_in, tokens_out)
        problem = _Temporary("no verdict in the answer")
    raise problem


async def _request(
    session: aiohttp.ClientSession, caption: str, question: Question, config: EndpointConfig, attempt: int
) -> tuple[str, int, int]:
    body = {
        "model": config.model,
        "messages": question.messages(caption),
        # A second try at temperature 0 would say the same unreadable thing.
        "temperature": 0 if attempt == 0 else 0.3,
        "max_tokens": config.max_tokens,
    }
    try:
        async with session.post(config.address, json=body, allow_redirects=False) as response:
            content = await response.content.read(_LONGEST_ANSWER)
            status, wait = response.status, response.headers.get("Retry-After", "")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _Temporary(type(error).__name__) from error
    if status in _NO_USE_ASKING_AGAIN:
        raise UserError(
            f"the judge refused the question with status {status}",
            found=content[:300].decode("utf-8", "replace"),
            do=f"check --judge-url, --judge-model and the key in {config.key_variable}; answers so far are kept",
        )
    if status != 200:
        raise _Temporary(f"http-{status}", min(float(wait), 300.0) if wait.replace(".", "", 1).isdigit() else None)
    return _read_completion(content)


def _read_completion(content: bytes) -> tuple[str, int, int]:
    """Text and token counts of a chat completion; anything else is worth another try."""
    try:
        value = json.loads(content)
        text = value["choices"][0]["message"]["content"]
        usage = value.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _Temporary("not a chat completion") from error
    if not isinstance(text, str):
        raise _Temporary("an answer without text")
    return text, *tokens


def unanswered_error(unanswered: dict[str, str]) -> HoldfastError:
    """What the command says when the endpoint left questions open."""
    reasons = sorted({problem: list(unanswered.values()).count(problem) for problem in unanswered.values()}.items())
    return HoldfastError(
        f"{len(unanswered)} captions got no answer from the judge",
        found=", ".join(f"{reason}: {count}" for reason, count in reasons),
        do="run the same command again: the answers so far are kept; or drop those captions with --drop-unanswered",
    )
