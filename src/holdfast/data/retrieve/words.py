"""What it means for a caption to contain a word, and the regular expressions that say so to DuckDB.

A word is there when it stands between characters that are not letters, marks, digits or underscores, in any script and
in upper or lower case: ``fog`` is in ``Fog, again`` and not in ``fogón`` or ``décor_fog2``. RE2's own ``\\b`` knows
ASCII only, so the boundaries are written out. A term whose edge is in a script without spaces (Han, kana, Thai, ...)
asks for no boundary at that edge, or it would never be found.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.errors import UserError

_WORD = r"\pL\pM\pN_"
_BEFORE, _AFTER = rf"(?:^|[^{_WORD}])", rf"(?:$|[^{_WORD}])"
_SPACE = r"[\s\pZ]+"
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")
# First letters of Unicode names: the scripts written without spaces between words.
_NO_SPACES = ("CJK ", "HIRAGANA", "KATAKANA", "THAI", "LAO ", "KHMER", "MYANMAR", "TIBETAN", "HALFWIDTH KATAKANA")


@dataclass(frozen=True)
class Words:
    """The target's name, its synonyms, and phrases that rule a caption out."""

    about: str
    also: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "about", tidy(self.about, "--about"))
        object.__setattr__(self, "also", _distinct((tidy(term, "--also") for term in self.also), but=self.about))
        object.__setattr__(self, "exclude", _distinct(tidy(term, "--not") for term in self.exclude))
        both = {term.casefold() for term in self.exclude} & {term.casefold() for term in self.terms}
        if both:
            raise UserError(
                f"{sorted(both)[0]!r} is both looked for and ruled out",
                do="take it out of --not, or out of --about and --also",
            )

    @property
    def terms(self) -> tuple[str, ...]:
        """Everything that is looked for."""
        return (self.about, *self.also)

    @property
    def quick(self) -> tuple[str, ...]:
        """Cheap expressions, one of which every match satisfies.

        Each is one literal, for which RE2 has a fast path that alternations and character classes lose. A needle that
        contains another (``foggy``, ``fog``) adds nothing and is left out.
        """
        needles = {max(form.split(), key=len) for term in self.terms for form in _forms(term)}
        least = {needle for needle in needles if not any(other != needle and other in needle for other in needles)}
        return tuple(f"(?i){_escape(item)}" for item in sorted(least))

    @property
    def loose(self) -> str:
        """Any term anywhere, boundaries or not: what a negative must not contain."""
        return f"(?i)(?:{'|'.join(_spelled(form) for term in self.terms for form in _forms(term))})"

    @property
    def whole(self) -> str:
        """Any term as a whole word."""
        return _whole(self.terms)

    @property
    def excluded(self) -> str | None:
        """Any phrase that rules a caption out, as whole words."""
        return _whole(self.exclude) if self.exclude else None


def tidy(term: str, option: str) -> str:
    """One term, spaces made single; a term without a letter or digit is the user's mistake."""
    clean = " ".join(unicodedata.normalize("NFC", term).split())
    if not any(unicodedata.category(char)[0] in "LN" for char in clean):
        raise UserError(
            f"{option} got {term!r}", expected="a word or phrase with a letter or digit", do=f"write {option} WORD"
        )
    return clean


def _distinct(terms: Iterable[str], but: str | None = None) -> tuple[str, ...]:
    kept: dict[str, str] = {}
    for term in terms:
        if but is None or term.casefold() != but.casefold():
            kept.setdefault(term.casefold(), term)
    return tuple(kept.values())


def _forms(term: str) -> list[str]:
    """Composed and decomposed spelling: captions come in both, and RE2 compares code points."""
    return sorted({unicodedata.normalize("NFC", term), unicodedata.normalize("NFD", term)})


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _spelled(form: str) -> str:
    return _SPACE.join(_escape(part) for part in form.split())


def _whole(terms: Iterable[str]) -> str:
    # Grouping by edges keeps the expression short: nearly always one group.
    groups: dict[tuple[str, str], list[str]] = {}
    for term in terms:
        before = "" if _writes_no_spaces(term[0]) or not _is_word(term[0]) else _BEFORE
        after = "" if _writes_no_spaces(term[-1]) or not _is_word(term[-1]) else _AFTER
        groups.setdefault((before, after), []).extend(_spelled(form) for form in _forms(term))
    # Ignoring case outside the terms would make the character classes, which it does not change, slower to compile.
    return "|".join(f"{before}(?i:{'|'.join(item)}){after}" for (before, after), item in groups.items())


def _is_word(char: str) -> bool:
    return char == "_" or unicodedata.category(char)[0] in "LMN"


def _writes_no_spaces(char: str) -> bool:
    return unicodedata.name(char, "").startswith(_NO_SPACES)
