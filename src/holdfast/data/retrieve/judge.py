"""Judge: which of the captions found are really about the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.data.retrieve.answers import AnswerCache
from holdfast.data.retrieve.endpoint import EndpointConfig, ask_all, unanswered_error
from holdfast.data.retrieve.manifest import ROWS, Note, RetrievalFolder, fingerprint_step
from holdfast.data.retrieve.question import QUESTIONS, Question, steers
from holdfast.data.retrieve.similarity import Embed, SimilarityConfig, examples_around, score_captions
from holdfast.files import fingerprint_file, write_atomic, write_json

Progress = Callable[[int, int], None]

JUDGED = pa.schema(
    [
        *ROWS,
        pa.field("kept", pa.bool_(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("reason", pa.string()),
    ]
)
STEERS = "the caption tries to steer the judge"


def judge_none(out: Path) -> dict[str, Any]:
    """Keep every caption found."""
    with RetrievalFolder(out).writing("search") as folder:
        rows, source = _found(folder)
        kept = [True] * len(rows)
        return _finish(folder, rows, source, {"judge": "none"}, kept, [None] * len(rows), [None] * len(rows), {})


def judge_by_similarity(
    out: Path, config: SimilarityConfig, embed: Embed, encoder: str, progress: Progress | None = None
) -> dict[str, Any]:
    """Keep the captions whose similarity reaches the threshold; examples around it are written beside."""
    with RetrievalFolder(out).writing("search") as folder:
        rows, source = _found(folder)
        captions = _captions(rows)
        scores = score_captions(captions, config, embed, progress)
        write_json(folder.judged.parent / "examples.json", examples_around(captions, scores, config.threshold))
        how = {"judge": "similarity", "encoder": encoder, **asdict(config)}
        kept = [bool(score >= config.threshold) for score in scores]
        return _finish(folder, rows, source, how, kept, [float(score) for score in scores], [None] * len(rows), {})


def judge_by_endpoint(
    out: Path,
    question: Question,
    config: EndpointConfig,
    *,
    cache: Path | None = None,
    drop_unanswered: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> dict[str, Any]:
    """Ask a language model about every caption; nothing is asked twice, and a stopped job goes on."""
    with RetrievalFolder(out).writing("search") as folder:
        rows, source = _found(folder)
        captions = _captions(rows)
        asked = [caption for caption in captions if not steers(caption)]
        answers = AnswerCache(cache or folder.answers, config.model, question)
        if answers.unreadable and note is not None:
            note(
                f"{answers.unreadable:,} lines of {answers.path} cannot be read; they are passed over, "
                "and what they answered is asked again"
            )
        unanswered = ask_all(asked, question, config, answers, progress)
        if unanswered and not drop_unanswered:
            raise unanswered_error(unanswered)
        kept, reasons = _verdicts(captions, answers)
        cost = _cost(asked, answers, config)
        steering = len(captions) - len(asked)
        counts = {"asked": cost["asked"], "unanswered": len(unanswered), "steering": steering, **cost}
        how = {
            "judge": "endpoint",
            "model": config.model,
            "question": question.name,
            "wording": QUESTIONS[question.name].replace("{target}", question.target),
        }
        return _finish(folder, rows, source, how, kept, [None] * len(rows), reasons, counts)


def wasted_tokens(out: Path, question: Question, config: EndpointConfig, cache: Path | None = None) -> dict[str, int]:
    """Tokens paid for answers that could not be read. They depend on luck, so the manifest leaves them out."""
    return dict(AnswerCache(cache or RetrievalFolder(out).answers, config.model, question).lost)


def _found(folder: RetrievalFolder) -> tuple[pa.Table, str]:
    """The rows that were found, and the fingerprint of the step that found them."""
    return folder.rows("search", "found"), fingerprint_step(folder.need("search"))


def _captions(rows: pa.Table) -> list[str]:
    return [str(text) for text in rows.column("text").to_pylist()]


def _verdicts(captions: Sequence[str], answers: AnswerCache) -> tuple[list[bool], list[str | None]]:
    kept: list[bool] = []
    reasons: list[str | None] = []
    for caption in captions:
        answer = None if steers(caption) else answers.get(caption)
        kept.append(answer is not None and answer.verdict.kept)
        reasons.append(STEERS if steers(caption) else answer.verdict.reason if answer else "no answer")
    return kept, reasons


def _cost(asked: Sequence[str], answers: AnswerCache, config: EndpointConfig) -> dict[str, Any]:
    used = [answer for caption in dict.fromkeys(asked) if (answer := answers.get(caption)) is not None]
    tokens_in, tokens_out = (sum(getattr(answer, name) for answer in used) for name in ("tokens_in", "tokens_out"))
    cost = round((tokens_in * config.price_in + tokens_out * config.price_out) / 1e6, 6)
    return {"asked": len(used), "tokens_in": tokens_in, "tokens_out": tokens_out, "cost": cost}


def _finish(
    folder: RetrievalFolder,
    rows: pa.Table,
    source: str,
    how: dict[str, Any],
    kept: Sequence[bool],
    scores: Sequence[float | None],
    reasons: Sequence[str | None],
    counts: dict[str, Any],
) -> dict[str, Any]:
    columns = [*(rows.column(name) for name in ROWS.names), pa.array(kept, pa.bool_())]
    columns += [pa.array(scores, pa.float64()), pa.array(reasons, pa.string())]
    table = pa.Table.from_arrays(columns, schema=JUDGED)
    write_atomic(folder.judged, lambda path: pq.write_table(table, path))
    section = {
        "input": source,
        **how,
        "counts": {"judged": len(kept), "kept": sum(kept), "dropped": len(kept) - sum(kept), **counts},
        "hashes": {"judged": fingerprint_file(folder.judged)},
    }
    folder.finish("judge", section)
    return section
