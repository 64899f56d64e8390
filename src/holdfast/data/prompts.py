"""Sentences for classes: templates with the right article, or a file of sentences."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config import read_toml
from holdfast.data.names import printable
from holdfast.errors import UserError, nearest
from holdfast.files import read_json

# Sound decides, not spelling: these begin with a vowel that is spoken as a consonant, or the other way round.
_SPOKEN_A = re.compile(r"(uni([^dimn]|$)|us[aeu]|uk\b|util|utop|ewe|eu|one\b|once)", re.IGNORECASE)
_SPOKEN_AN = re.compile(r"(hour|honest|honou?r|heir)", re.IGNORECASE)
# Things that take no article.
_NO_ARTICLE = frozenset({"badlands", "office cubicles"})


def article(words: str) -> str:
    """``"a "``, ``"an "``, or nothing for a plural that takes none."""
    if words.lower() in _NO_ARTICLE:
        return ""
    if _SPOKEN_AN.match(words):
        return "an "
    vowel = words[:1].lower() in "aeiou" and not _SPOKEN_A.match(words)
    return "an " if vowel else "a "


def fill(template: str, words: str) -> str:
    """The template with ``{}`` replaced; an article before the placeholder agrees with the words."""
    start, _, end = template.partition("{}")
    leading = re.search(r"(?:^|(?<=\s))(a|an|a\(n\)|A|An|A\(n\))\s+$", start)
    if leading is None:
        return f"{start}{words}{end}"
    chosen = article(words)
    if leading.group(1)[0] == "A":
        chosen = chosen.capitalize()
    return f"{start[: leading.start()]}{chosen}{words}{end}"


# Category names of Places365 that their parts alone would turn into something nobody says.
_WORDS = {
    "archaelogical_excavation": "archaeological excavation",
    "artists_loft": "artist's loft",
    "bakery/shop": "bakery shop",
    "barndoor": "barn door",
    "butchers_shop": "butcher's shop",
    "carrousel": "carousel",
    "childs_room": "child's room",
    "desert/sand": "sandy desert",
    "desert/vegetation": "desert with vegetation",
    "elevator/door": "elevator door",
    "fastfood_restaurant": "fast-food restaurant",
    "gazebo/exterior": "gazebo",
    "japanese_garden": "Japanese garden",
    "kindergarden_classroom": "kindergarten classroom",
    "moat/water": "moat with water",
    "mountain_snowy": "snowy mountain",
    "oilrig": "oil rig",
    "subway_station/platform": "subway station platform",
    "temple/asia": "Asian temple",
    "train_station/platform": "train station platform",
    "underwater/ocean_deep": "deep ocean",
    "veterinarians_office": "veterinarian's office",
}


def words_of(name: str) -> str:
    """The words for a class when none are given: ``_`` is a space, and ``hotel/outdoor`` an outdoor hotel."""
    if name in _WORDS:
        return _WORDS[name]
    return " ".join(" ".join(reversed(name.split("/"))).replace("_", " ").split())


def class_prompts(
    classes: Sequence[str],
    templates: Sequence[str],
    names: Mapping[str, str],
    given: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """The sentences of every class; two classes with the same sentences cannot be told apart and are refused."""
    prompts: list[tuple[str, ...]] = []
    for name in classes:
        sentences = (given or {}).get(name)
        if sentences is None:
            sentences = tuple(fill(template, names.get(name, words_of(name))) for template in templates)
        prompts.append(sentences)
    seen: dict[tuple[str, ...], str] = {}
    for name, sentences in zip(classes, prompts, strict=True):
        if sentences in seen:
            raise UserError(
                f"the classes {seen[sentences]!r} and {name!r} have the same words",
                found=repr(sentences[0]),
                do="give one of them other words under [task.names], or merge them in the source's `classes` table",
            )
        seen[sentences] = name
    return tuple(prompts)


def read_prompts(path: Path, classes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Sentences by class from a JSON or TOML file: ``class = "sentence"`` or a list of sentences."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file", expected="a JSON or TOML file of sentences")
    try:
        values: Any = read_json(path) if path.suffix.lower() == ".json" else read_toml(path)
    except RecursionError as error:
        raise UserError(f"{path} is not readable", found="it is nested too deeply") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable", found=str(error)) from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no table", expected='class = "sentence" or class = ["sentence", …]')
    result: dict[str, tuple[str, ...]] = {}
    for name, value in values.items():
        sentences = [value] if isinstance(value, str) else value
        if (
            not isinstance(sentences, list)
            or not sentences
            or not all(isinstance(sentence, str) and sentence.strip() for sentence in sentences)
        ):
            raise UserError(f"{path}: {name!r} has no sentences", expected="a sentence or a list of sentences")
        if any(printable(sentence) != sentence for sentence in sentences):
            raise UserError(f"{path}: a sentence of {name!r} is no text", expected="whole Unicode characters")
        if name not in classes:
            raise UserError(f"{path}: {name!r} is no class of this round", do=nearest(name, classes))
        result[name] = tuple(sentences)
    return result
