"""Judge: which of the captions found are really about the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.artifacts import fingerprint_file, write_atomic, write_json
from holdfast.data.retrieve.endpoint import AnswerCache, EndpointConfig, ask_all, unanswered_error
from holdfast.data.retrieve.manifest import ROWS, RetrievalFolder, fingerprint_step
from holdfast.data.retrieve.question import QUESTIONS, Question, steers
from holdfast.data.retrieve.similarity import Embed, SimilarityConfig, examples_around, score_captions

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
    folder, rows, source = _opened(out)
    kept = [True] * len(rows)
    return _finish(folder, rows, source, {"judge": "none"}, kept, [None] * len(rows), [None] * len(rows), {})


def judge_by_similarity(
    out: Path, config: SimilarityConfig, embed: Embed, encoder: str, progress: Progress | None = None
) -> dict[str, Any]:
    """Keep the captions whose similarity reaches the threshold; examples around it are written beside."""
    folder, rows, source = _opened(out)
    captions = [str(text) for text in rows.column("text").to_pylist()]
    scores = score_captions(captions, config, embed, progress)
    write_json(folder.judged.parent / "examples.json", examples_around(captions, scores, config.threshold))
    how = {"judge": "similarity", "encoder": encoder, **asdict(config)}
    kept = [bool(score >= config.threshold) for score in scores]
    return _finish(folder, rows, source, how, kept, [float(one) for one in scores], [None] * len(rows), {})


def judge_by_endpoint(
    out: Path,
    question: Question,
    config: EndpointConfig,
    *,
    cache: Path | None = None,
    drop_unanswered: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask a language model about every caption; nothing is asked twice, and a stopped job goes on."""
    folder, rows, source = _opened(out)
    captions = [str(text) for text in rows.column("text").to_pylist()]
    asked = [caption for caption in captions if not steers(caption)]
    answers = AnswerCache(cache or folder.answers, config, question)
    unanswered = ask_all(asked, question, config, answers, progress)
    if unanswered and not drop_unanswered:
        raise unanswered_error(unanswered)
    kept: list[bool] = []
    reasons: list[str | None] = []
    for caption in captions:
        answer = answers.get(caption)
        kept.append(answer is not None and answer.verdict.kept)
        reasons.append(STEERS if steers(caption) else answer.verdict.reason if answer else "no answer")
    used = [answer for caption in dict.fromkeys(asked) if (answer := answers.get(caption)) is not None]
    tokens_in, tokens_out = sum(one.tokens_in for one in used), sum(one.tokens_out for one in used)
    counts = {
        "asked": len(used),
        "unanswered": len(unanswered),
        "steering": len(captions) - len(asked),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "cost": round((tokens_in * config.price_in + tokens_out * config.price_out) / 1e6, 6),
    }
    how = {
        "judge": "endpoint",
        "model": config.model,
        "question": question.name,
        "wording": QUESTIONS[question.name].replace("{target}", question.target),
    }
    return _finish(folder, rows, source, how, kept, [None] * len(rows), reasons, counts)


def wasted_tokens(out: Path, question: Question, config: EndpointConfig, cache: Path | None = None) -> dict[str, int]:
    """Tokens paid for answers that could not be read. They depend on luck, so the manifest leaves them out."""
    return dict(AnswerCache(cache or RetrievalFolder(out).answers, config, question).lost)


def _opened(out: Path) -> tuple[RetrievalFolder, pa.Table, str]:
    folder = RetrievalFolder(out)
    source = fingerprint_step(folder.need("search"))
    return folder, pq.read_table(folder.found), source


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
