"""Build the documentation strictly and check every link: ``python tools/docs.py [OUT]``.

The site goes to OUT, or is thrown away. Checked are the links and anchors between pages, in the pages and in the
Markdown files beside ``docs/``, and that a page loads nothing from another host.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown.extensions.toc import slugify

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("README.md", "CONTRIBUTING.md")  # Markdown that links into docs/ and is no page of the site
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# A tag and its attribute that makes a browser load something by itself.
LOADING = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


@dataclass
class Page(HTMLParser):
    """What a page links to, loads, and can be linked to by."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids, links and what is loaded."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif (tag, name) in LOADING and value:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


def build(out: Path) -> list[str]:
    """Run mkdocs; its complaints, one a line."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [*done.stdout.splitlines(), *done.stderr.splitlines()]


def read_pages(site: Path) -> dict[Path, Page]:
    """Every page of a built site, parsed."""
    pages: dict[Path, Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def site_faults(site: Path) -> list[str]:
    """Links and anchors of a built site that lead nowhere, and whatever is loaded from elsewhere."""
    pages = read_pages(site)
    faults: list[str] = []
    for path, page in pages.items():
        if path.name == "404.html":  # served from any address: its links are absolute
            continue
        name = path.relative_to(site)
        for address in page.loaded:
            if urlsplit(address).scheme not in ("", "data"):
                faults.append(f"{name} loads {address}")
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            if not aim.exists():
                faults.append(f"{name}: {address} does not exist")
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].ids:
                faults.append(f"{name}: {address} has no such anchor")
    return faults


def anchors(markdown: str) -> set[str]:
    """The anchors of a Markdown file's headings."""
    headings = re.findall(r"^#+ +(.*?) *$", FENCED.sub("", markdown), re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def beside_faults(root: Path = ROOT) -> list[str]:
    """Links of the Markdown files beside docs/ that lead nowhere."""
    faults: list[str] = []
    for name in BESIDE:
        text = FENCED.sub("", (root / name).read_text(encoding="utf-8"))
        for address in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(address)
            if parts.scheme:
                continue
            aim = root / unquote(parts.path) if parts.path else root / name
            if not aim.exists():
                faults.append(f"{name}: {address} does not exist")
            elif parts.fragment and parts.fragment not in anchors(aim.read_text(encoding="utf-8")):
                faults.append(f"{name}: {address} has no such anchor")
    return faults


def main() -> int:
    """Build, check, and say what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(folder) / "site"
        faults = [*beside_faults(), *(build(out) or site_faults(out))]
    print("\n".join(faults) if faults else f"docs: every link leads somewhere{f'; {out}' if sys.argv[1:] else ''}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
