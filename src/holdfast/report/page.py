"""The page about a run, a study or a project, written with its cards."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import UserError
from holdfast.files import where_instead, write_json, write_text
from holdfast.report.card import card_json, card_markdown
from holdfast.report.content import read_run
from holdfast.report.html.document import document
from holdfast.report.project import project_banner, project_card, project_markdown, project_sections, read_project
from holdfast.report.sections.banner import run_banner
from holdfast.report.sections.run import run_sections
from holdfast.report.study import read_study, study_banner, study_card, study_markdown, study_sections

_WANTED = "the folder of a run, a study or a project, made by `holdfast develop` or `holdfast compare`"
LARGEST = 6_000_000  # bytes of a page


def write_report(path: Path, out: Path | None = None) -> list[Path]:
    """The page about a run, a study or a project, with its cards beside it; the files that were written."""
    if not path.is_dir():
        is_there = "is not a folder" if os.path.exists(path) else "does not exist"
        do = where_instead(path, "name the folder, such as runs/ROUND")
        raise UserError(f"{path} {is_there}", expected=_WANTED, do=do)
    target = out or path / "report.html"
    if (path / "run.json").exists():
        return _write_run(path, target)
    if (path / "project.json").exists():
        return _write_project(path, target)
    if (path / "study.json").exists():
        return _write_study(path, target)
    raise UserError(
        f"{path} is neither a run, nor a study, nor a project",
        expected=_WANTED,
        do="name the folder, such as runs/ROUND",
    )


def _write_run(path: Path, out: Path) -> list[Path]:
    content = read_run(path)
    name = path.resolve().name
    whole = document(f"{name}: {content.target}", f"Update report · {name}", run_banner(content), run_sections(content))
    card = card_json(content, name)
    return write_page(out, whole, card, card_markdown(card))


def _write_project(path: Path, out: Path) -> list[Path]:
    content, name = read_project(path), path.resolve().name
    whole = document(name, f"Project · {name}", project_banner(content), project_sections(content))
    card = project_card(content, name)
    return write_page(out, whole, card, project_markdown(card))


def _write_study(path: Path, out: Path) -> list[Path]:
    content = read_study(path)
    name = str(content.config.get("title") or path.resolve().name)
    whole = document(name, f"Study · {name}", study_banner(content), study_sections(content))
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
