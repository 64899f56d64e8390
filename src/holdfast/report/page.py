"""One self-contained HTML file: template, style, script, sections. Nothing is fetched, and only our script runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from holdfast._version import __version__
from holdfast.artifacts import write_json, write_text
from holdfast.errors import UserError
from holdfast.report.card import card_json, card_markdown
from holdfast.report.content import read_run
from holdfast.report.markup import Markup, join, tag, text
from holdfast.report.project import project_banner, project_card, project_markdown, project_sections, read_project
from holdfast.report.sections import Section, run_banner, run_sections
from holdfast.report.study import read_study, study_banner, study_card, study_markdown, study_sections

LARGEST = 6_000_000  # bytes of a page


def page(title: str, kicker: str, banner: Markup, sections: Sequence[Section]) -> str:
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
    for piece in pieces[1:]:  # one pass: what is filled in is never looked at again
        name, _, rest = piece.partition("}}")
        whole += [filled[name], rest]
    return "".join(whole)


def _asset(name: str) -> str:
    return files("holdfast.report").joinpath(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def write_report(path: Path, out: Path | None = None) -> list[Path]:
    """The page about a run, a study or a project, with its cards beside it; the files that were written."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder", expected="a run, a study or a project")
    target = out or path / "report.html"
    if (path / "run.json").exists():
        return _write_run(path, target)
    if (path / "project.json").exists():
        return _write_project(path, target)
    if (path / "study.json").exists():
        return _write_study(path, target)
    raise UserError(
        f"{path} is neither a run, nor a study, nor a project",
        expected="a folder that `holdfast develop` or `holdfast compare` made",
    )


def _write_run(path: Path, out: Path) -> list[Path]:
    content = read_run(path)
    name = path.resolve().name
    whole = page(f"{name}: {content.target}", f"Update report · {name}", run_banner(content), run_sections(content))
    card = card_json(content, name)
    return write_page(out, whole, card, card_markdown(card))


def _write_project(path: Path, out: Path) -> list[Path]:
    content, name = read_project(path), path.resolve().name
    whole = page(name, f"Project · {name}", project_banner(content), project_sections(content))
    card = project_card(content, name)
    return write_page(out, whole, card, project_markdown(card))


def _write_study(path: Path, out: Path) -> list[Path]:
    content = read_study(path)
    name = str(content.config.get("title") or path.resolve().name)
    whole = page(name, f"Study · {name}", study_banner(content), study_sections(content))
    card = study_card(content, name)
    return write_page(out, whole, card, study_markdown(card))


def write_page(out: Path, whole: str, card: dict[str, object], markdown: str) -> list[Path]:
    """Page and cards, each whole or not at all."""
    size = len(whole.encode())
    if size > LARGEST:
        raise UserError(f"the page would have {size:,} bytes", expected=f"at most {LARGEST:,}")
    write_text(out, whole)
    write_text(out.with_suffix(".md"), markdown)
    write_json(out.with_suffix(".json"), card)
    return [out, out.with_suffix(".md"), out.with_suffix(".json")]
