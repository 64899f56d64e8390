"""Labels and predictions in one vocabulary, and checks that both models speak it.

A prediction is right where it equals the label, so a model that writes its answers in other words than the labels looks
as if it were always wrong, and its rival as if it had gained. Three things stand against that:

1. *Numbers are read alike.* Where every label is a number, labels and predictions are compared as numbers: 3, 3.0, 03
   and 3e0 are one class, in CSV and Parquet, as text or as numbers. Only where the labels hold both 03 and 3 are they
   codes, and compared as text.
2. *Each model is checked on its own.* One that never predicts a label is refused; one that hardly does is a warning.
3. *Spelling.* A prediction that differs from a label in capitals, spaces, ``_`` or ``-`` only is refused.

A table of free text (many different labels, each in few rows, not the names of the tasks) has no closed list of
classes: there the third check, and the one that a label must be known to something else, are warnings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.certify.columns import MAYBE_A_NAME, NEVER_A_NAME, Column, refuse_missing
from holdfast.errors import UserError, nearest

_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,4}))?")
_BETWEEN = re.compile(r"(?<=[^\W_])[\s_\-]+(?=[^\W_])")
_MOST_ZEROS = 20  # written out; beyond, a number has an exponent
# Free text: more labels than this, and fewer rows a label than that.
FREE_TEXT_LABELS, FREE_TEXT_ROWS = 20, 10
# A model hardly matches: fewer of its predictions are labels, in a closed list or against the other model in free text.
HARDLY, HARDLY_FREE = 0.5, 0.25
FEW_ROWS = 20  # below, hardly ever right says nothing


@dataclass(frozen=True)
class Answers:
    """Labels and predictions, checked, in one vocabulary."""

    label: Column
    old: Column
    new: Column
    numbers: bool  # compared as numbers
    warnings: tuple[str, ...]


def number(text: str) -> str | None:
    """A decimal number in one spelling, None for any other text: ``3`` for 3, 3.0, 03, +3 and 3e0."""
    found = _NUMBER.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return None
    fraction = found[3] or ""
    digits, exponent = (found[2] + fraction).lstrip("0"), int(found[4] or 0) - len(fraction)
    exponent += len(digits) - len(digits.rstrip("0"))
    digits = digits.rstrip("0")
    if not digits:
        return "0"
    sign = "-" if found[1] == "-" else ""
    if 0 <= exponent <= _MOST_ZEROS:
        return sign + digits + "0" * exponent
    if -_MOST_ZEROS - len(digits) <= exponent < 0:
        padded = digits.rjust(1 - exponent, "0")
        return f"{sign}{padded[:exponent]}.{padded[exponent:]}"
    return f"{sign}{digits}e{exponent}"


def are_numbers(labels: Iterable[str]) -> bool:
    """Whether all labels are numbers, and none is a code: a code is 03 where 3 is another label."""
    spellings: dict[str, list[str]] = {}
    for label in labels:
        value = number(label)
        if value is None:
            return False
        spellings.setdefault(value, []).append(label)
    return bool(spellings) and not any(
        len(written) > 1 and any(re.match(r"[+-]?0[0-9]", label) for label in written) for written in spellings.values()
    )


def read_answers(
    labels: Mapping[Path, Column],
    task: Column,
    predictions: Mapping[str, Column],
    declared: Iterable[str],
    paths: Mapping[str, Path],
) -> Answers:
    """Labels (one column, or one of each file, in the same order of rows) and both models' predictions, checked.

    ``declared`` are all labels there are, by the user's word: any other is refused. ``paths`` says which file holds a
    model's predictions.
    """
    allowed = set(declared)
    everywhere = {name for column in labels.values() for name in column.names}
    predicted = {name for column in predictions.values() for name in column.names}
    classes = {name for name in everywhere & predicted if name.lower() in MAYBE_A_NAME} | allowed
    for path, column in labels.items():
        refuse_missing(column, "label", path, classes)
    for name, column in predictions.items():
        refuse_missing(column, name if len(labels) == 1 else "prediction", paths[name], classes)
    refuse_missing(task, "task", next(iter(labels)), classes)
    numbers = are_numbers(everywhere | allowed)
    rename: Callable[[str], str] = (lambda name: number(name) or name) if numbers else (lambda name: name)
    read = [column.renamed(rename) for column in labels.values()]
    if len(read) == 2:
        _check_same(read[0], read[1], list(labels))
    answers = {name: column.renamed(rename) for name, column in predictions.items()}
    where = " and ".join(str(path) for path in labels)
    tasks = {rename(name) for name in task.names}
    warnings = _check(read[0], tasks, answers, {rename(name) for name in allowed}, where)
    return Answers(read[0], answers["old"], answers["new"], numbers, tuple(warnings))


def _check_same(old: Column, new: Column, paths: list[Path]) -> None:
    different = int((~old.equals(new)).sum())
    if different:
        raise UserError(
            f"{paths[0]} and {paths[1]} give {different} images different labels",
            expected="the same label for an image in both files",
            do="write both files from the same labels",
        )


def _check(label: Column, tasks: set[str], predictions: dict[str, Column], allowed: set[str], where: str) -> list[str]:
    labels = set(label.names)
    predicted = {name for column in predictions.values() for name in column.names}
    free = not allowed and _is_free_text(label, tasks)
    warnings: list[str] = []
    unknown = sorted((labels | predicted) - allowed) if allowed else sorted(labels - tasks - predicted)
    if unknown and free:
        warnings.append(
            f"{len(unknown)} of {len(labels)} labels were predicted by neither model, such as {unknown[0]!r}"
        )
    elif unknown:
        raise UserError(
            f"{where} holds unknown {'label' if len(unknown) == 1 else 'labels'} {', '.join(unknown[:5])}",
            expected="labels that --labels names" if allowed else "labels that are a task or that a model predicts",
            found=f"{unknown[0]!r}; {nearest(unknown[0], allowed or tasks | predicted)}",
            do="correct the spelling, or name all labels with --labels a,b,c",
        )
    for name, column in predictions.items():
        warnings += _check_spelling(name, column, labels | tasks, allowed, free, where)
    for name, column in predictions.items():
        _check_model(name, column, label, allowed, where)
    return [*warnings, *_hardly(label, predictions, free), *_words_for_missing(label, predictions)]


def _is_free_text(label: Column, tasks: set[str]) -> bool:
    distinct = len(label.names)
    many = distinct > FREE_TEXT_LABELS and len(label.codes) < FREE_TEXT_ROWS * distinct
    return many and not set(label.names) <= tasks


def _spelling(name: str) -> str:
    return number(name) or _BETWEEN.sub("", name.casefold())


def _check_spelling(
    model: str, column: Column, known: set[str], allowed: set[str], free: bool, where: str
) -> list[str]:
    spellings = {_spelling(name): name for name in sorted(known)}
    other = [name for name in column.names if name not in known | allowed and _spelling(name) in spellings]
    if not other:
        return []
    label = spellings[_spelling(other[0])]
    if not free:
        raise UserError(
            f"{where}: column {model} holds the unknown label {other[0]!r}",
            expected=f"the spelling of the labels, {label!r}",
            do="write predictions and labels alike: a different spelling counts as a wrong answer",
        )
    rows = int(column.among(set(other)).sum())
    return [
        f"{rows} predictions of the {model} model differ from a label in spelling only, such as {other[0]!r} and "
        f"{label!r}: they count as wrong; grade them yourself in the columns old_correct and new_correct"
    ]


def _check_model(model: str, column: Column, label: Column, allowed: set[str], where: str) -> None:
    """A model that never says a label speaks another language: every one of its answers would count as wrong."""
    if allowed or set(column.names) & set(label.names):
        return
    everywhere = np.ones(len(label.codes), dtype=np.bool_)
    raise UserError(
        f"{where}: no prediction of the {model} model is one of the labels",
        expected=f"predictions such as {_quoted(label.most_frequent(everywhere))}",
        found=_quoted(column.most_frequent(everywhere)),
        do="write predictions as the names that the labels use, name all labels with --labels a,b,c, or grade the "
        "answers yourself in the columns old_correct and new_correct",
    )


def _hardly(label: Column, predictions: dict[str, Column], free: bool) -> list[str]:
    labels, warnings = set(label.names), list[str]()
    shares = {name: float(column.among(labels).mean()) for name, column in predictions.items()}
    for name, column in predictions.items():
        strange = ~column.among(labels)
        if shares[name] < (HARDLY_FREE * max(shares.values()) if free else HARDLY):
            warnings.append(
                f"only {shares[name] * 100:.3g} % of the {name} model's predictions are labels at all: the others are "
                f"{_quoted(column.most_frequent(strange))}, the labels "
                f"{_quoted(label.most_frequent(np.ones(len(strange), dtype=np.bool_)))}"
            )
            continue
        right = float(column.equals(label).mean())
        if not free and len(labels) > 1 and len(strange) >= FEW_ROWS and right < 0.5 / len(labels):
            warnings.append(
                f"the {name} model is right on {right * 100:.3g} % of the rows, less than half of what guessing gives: "
                "do its predictions number the classes as the labels do?"
            )
    return warnings


def _words_for_missing(label: Column, predictions: dict[str, Column]) -> list[str]:
    """A class called NA that both models always recognise may as well be rows without values."""
    warnings: list[str] = []
    for word in [name for name in label.names if name.lower() in MAYBE_A_NAME | NEVER_A_NAME]:
        rows = label.among({word})
        if all(bool(column.among({word})[rows].all()) for column in predictions.values()):
            warnings.append(
                f"{int(rows.sum())} rows have the label {word}, and both models always say {word} there: remove them "
                "if it means that a value is missing"
            )
    return warnings


def _quoted(names: list[str]) -> str:
    return ", ".join(repr(name[:60]) for name in names)
