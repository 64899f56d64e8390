"""The judge's answers on disk: nothing that was paid for is asked twice."""

from __future__ import annotations

import fcntl
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.data.retrieve.question import Question, Verdict
from holdfast.files import canonical_json, fingerprint_json, not_writable, read_or_empty

_LARGEST_CACHE = 2 << 30  # bytes: some seven million answers
MOST_TOKENS = 10**9  # of one answer; more than that is no count


@dataclass(frozen=True)
class Answer:
    """A verdict and what it cost, as far as the endpoint said."""

    verdict: Verdict
    tokens_in: int
    tokens_out: int


class AnswerCache:
    """Answers of one model to one question, one JSON line each, in a file that others may use at the same time.

    Lines that cannot be read are passed over and their captions asked about again: the end of a line that a kill cut
    short, and what else became of the file. ``unreadable`` counts them.
    """

    def __init__(self, path: Path, model: str, question: Question) -> None:
        self.path = path
        self.unreadable = 0
        self.lost: dict[str, int] = {"tokens_in": 0, "tokens_out": 0}  # answers that could not be read cost as well
        self._scope = fingerprint_json([model, question.fingerprint()])[7:]
        self._known: dict[str, Answer] = {}
        content = read_or_empty(
            path,
            _LARGEST_CACHE,
            what=f"the answers in {path}",
            expected="a file of answers, or a name that is free",
            do="name another file with --cache",
        )
        for line in io.BytesIO(content):
            entry = _parse(line)
            if entry is None:
                self.unreadable += 1
            elif entry["scope"] == self._scope:
                self._remember(entry)

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
        try:
            _append_line(self.path, canonical_json(entry).encode())
        except OSError as error:
            raise not_writable(self.path, error) from error
        self._remember(entry)


def _parse(line: bytes) -> dict[str, Any] | None:
    """An entry as :meth:`AnswerCache._append` writes it, or None."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("scope"), str):
        return None
    if not all(type(entry.get(name)) is int and 0 <= entry[name] <= MOST_TOKENS for name in ("in", "out")):
        return None
    if entry.get("caption", 0) is None:
        return entry
    types = (("caption", str), ("kept", bool), ("reason", str))
    return entry if all(isinstance(entry.get(name), kind) for name, kind in types) else None


def _append_line(path: Path, line: bytes) -> None:
    """Add a whole line, on a line of its own, whoever else appends to the file and whatever a kill left at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + line + b"\n")


def _digest(caption: str) -> str:
    return fingerprint_json(caption)[7:]
