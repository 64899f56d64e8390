"""One self-contained HTML file: template, style, script, sections. Nothing is fetched, and only our script runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from holdfast._version import __version__
from holdfast.report.html.markup import Markup, join, tag, text


@dataclass(frozen=True)
class Section:
    """A heading with its content; ``name`` is where links go, ``short`` what they say."""

    name: str
    short: str
    title: str
    body: Markup


def document(title: str, kicker: str, banner: Markup, sections: Sequence[Section]) -> str:
    """The whole file. Style and script are named by hash, so that no other can be smuggled in."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    links = [tag("a", section.short, href=f"#{section.name}") for section in sections]
    body = [
        tag("section", tag("h2", section.title), section.body, id=section.name, class_="part") for section in sections
    ]
    filled = {
        "title": text(title),
        "policy": text(policy),
        "kicker": text(kicker),
        "banner": banner,
        "links": join(links),
        "sections": join(body),
        "version": text(__version__),
        "style": Markup(style),
        "script": Markup(script),
    }
    pieces = _asset("page.html").split("{{")
    whole = [pieces[0]]
    for piece in pieces[1:]:  # one pass: what is filled in is not parsed again
        name, _, rest = piece.partition("}}")
        whole += [filled[name], rest]
    return "".join(whole)


def _asset(name: str) -> str:
    return files("holdfast.report.html").joinpath(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
