"""The page in a real Chromium: no complaint in the console, sorting and searching work, nothing overlaps or runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.report.page import write_report
from tests.browser.chromium import PROGRAM, Tab, browser
from tests.report.fabricated import HOSTILE, made_up_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs chromium (Debian: apt-get install chromium)")
WIDTHS = (360, 800, 1600)

# Pairs of boxes with text of their own that lie on each other, and boxes that leave the window.
OVERLAPS = """(() => {
  const seen = (e) => { const b = e.getBoundingClientRect(); return e.checkVisibility() && b.width * b.height > 0; };
  const blocks = [...document.querySelectorAll(
    "h1,h2,h3,p:not(.find),figcaption,figure>svg,.figure,.scroll,.gallery li,dl,.legend,.badge")].filter(seen);
  const found = [];
  const boxes = blocks.map((e) => e.getBoundingClientRect());
  for (let i = 0; i < blocks.length; i++) {
    const a = boxes[i];
    if (a.left < -1 || a.right > innerWidth + 1)
      found.push(`leaves the window: ${blocks[i].tagName} ${blocks[i].textContent.slice(0, 40)}`);
    for (let j = i + 1; j < blocks.length; j++) {
      if (blocks[i].contains(blocks[j]) || blocks[j].contains(blocks[i])) continue;
      const b = boxes[j];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 2)
        found.push(`${blocks[i].tagName} ${blocks[i].textContent.slice(0, 30)} on ${blocks[j].tagName} ` +
                   `${blocks[j].textContent.slice(0, 30)}`);
    }
  }
  return found;
})()"""
TICKS = """(() => [...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const texts = [...chart.querySelectorAll("text.tick[text-anchor=middle], text.name:not([transform])")];
  const boxes = texts.map((one) => one.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).flatMap((b, j) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1
      ? [`${texts[i].textContent} on ${texts[i + 1 + j].textContent}`] : []));
}))()"""
FIRST = """[...document.querySelectorAll('#task-table tbody tr')]
  .filter((r) => !r.hidden).map((r) => r.cells[0].dataset.value)"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as single:
        yield single


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run = made_up_run(folder / "run", drop=0.2, source=folder / "pictures", margin=0.5)
    return write_report(run, folder / "page.html")[0]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    run = made_up_run(folder / "run", HOSTILE, drop=0.3, source=folder / "pictures", sealed="none")
    return write_report(run, folder / "page.html")[0]


@pytest.mark.parametrize("dark", [False, True])
def test_it_loads_without_a_complaint_and_asks_for_nothing(tab: Tab, page: Path, dark: bool) -> None:
    tab.complaints.clear()
    tab.requests.clear()
    tab.open(page, dark=dark)
    assert tab.complaints == []
    assert [request for request in tab.requests if not request.startswith(("file://", "data:"))] == []
    paper = tab.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 22, 24)" if dark else "rgb(251, 250, 247)")


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_or_leaves_the_window(tab: Tab, page: Path, hostile: Path, width: int) -> None:
    for item in (page, hostile):
        tab.open(item, width=width)
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run(OVERLAPS) == []
        assert tab.run(TICKS) == []


def test_verdict_and_figures_share_the_width_of_a_screen(tab: Tab, page: Path) -> None:
    tab.open(page, width=1280)
    boxes = "['.verdict', '.figures'].map((s) => document.querySelector(s).getBoundingClientRect().toJSON())"
    verdict, figures = tab.run(boxes)
    assert figures["left"] >= verdict["right"]
    assert figures["right"] > 1150
    assert figures["top"] < verdict["bottom"]


def test_no_column_is_cut_at_1280(tab: Tab, page: Path, hostile: Path) -> None:
    cut = """[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)
      .map((e) => `${e.getAttribute('aria-label')}: ${e.scrollWidth} of ${e.clientWidth}`)"""
    for path in (page, hostile):
        tab.open(path, width=1280)
        assert tab.run(cut) == []


def test_on_a_telephone_the_verdicts_are_seen_without_scrolling_sideways(tab: Tab, page: Path) -> None:
    tab.open(page, width=400)
    assert tab.run("document.querySelector('.verdict h1').getBoundingClientRect().bottom") < 900
    rights = "[...document.querySelectorAll('#task-table .word')].map((e) => e.getBoundingClientRect().right)"
    found = tab.run(rights)
    assert found
    assert max(found) <= 400


def test_advice_comes_before_the_first_plot(tab: Tab, page: Path) -> None:
    tab.open(page)
    names = tab.run("[...document.querySelectorAll('section.part')].map((e) => e.id)")
    assert names[0] == "advice"
    order = "document.querySelector('#advice table').compareDocumentPosition(document.querySelector('svg'))"
    assert tab.run(order) & 4  # the plot follows


def test_sorting_by_click_and_by_keyboard(tab: Tab, page: Path) -> None:
    tab.open(page)
    worst_first = tab.run(FIRST)
    tab.run("document.querySelector('#task-table th[data-sort=text] button').click()")
    assert tab.run(FIRST) == sorted(worst_first)
    change = "document.querySelectorAll('#task-table thead th')[2]"
    tab.run(f"{change}.querySelector('button').focus()")
    tab.key("Enter", 13)
    assert tab.run(f"{change}.getAttribute('aria-sort')") == "ascending"
    assert tab.run(FIRST)[0] == worst_first[0]
    tab.key("Enter", 13)
    values = tab.run(
        "[...document.querySelectorAll('#task-table tbody tr')].map((r) => Number(r.cells[2].dataset.value))"
    )
    assert values == sorted(values, reverse=True)


def test_searching_hides_rows_and_counts(tab: Tab, page: Path) -> None:
    tab.open(page)
    find = """(() => { const one = document.querySelector('input[data-filter=task-table]');
      one.value = 'sn'; one.dispatchEvent(new Event('input')); })()"""
    tab.run(find)
    assert tab.run(FIRST) == ["snow"]
    assert tab.run("document.querySelector('output[data-count=task-table]').textContent") == "1 of 4"
    tab.run(find.replace("task-table", "gallery").replace("'sn'", "'fog'"))
    shown = tab.run("[...document.querySelectorAll('.gallery li')].filter((e) => !e.hidden).map((e) => e.dataset.find)")
    assert shown
    assert all("fog" in item for item in shown)


def test_figures_answer_to_pointer_and_arrow_keys_and_grow(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.querySelector('svg.chart').focus()")
    tab.key("ArrowRight", 39)
    shown = tab.run("document.querySelector('.tip').textContent")
    assert shown == tab.run("document.querySelector('svg.chart [data-tip]').dataset.tip")
    assert not tab.run("document.querySelector('.tip').hidden")
    tab.key("Enter", 13)
    assert tab.run("document.querySelector('dialog').open")
    tab.key("Escape", 27)
    assert not tab.run("document.querySelector('dialog').open")


def test_a_series_stands_out(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.querySelector('.legend li[data-series]').click()")
    assert tab.run("document.querySelectorAll('.trace.on').length") == 3  # h, u and weight
    assert tab.run("document.querySelectorAll('svg.dim').length") > 0


def test_hostile_names_run_nothing(tab: Tab, hostile: Path) -> None:
    tab.complaints.clear()
    tab.open(hostile)
    assert tab.run("window.hit") is None
    assert tab.complaints == []
    assert tab.run("document.body.textContent.includes('<script>window.hit=1</script>')")
    tab.run("document.querySelectorAll('#task-table thead button')[0].click()")
    tab.run("document.querySelector('svg.chart').focus()")
    tab.key("ArrowRight", 39)
    tab.key("Enter", 13)
    assert tab.run("window.hit") is None


def test_without_scripts_everything_is_there(tab: Tab, page: Path) -> None:
    tab.open(page)
    rows = tab.run("document.querySelectorAll('#task-table tbody tr').length")
    tab.open(page, script=False)
    tab.call("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.run("document.querySelectorAll('#task-table tbody tr').length") == rows
    assert tab.run("getComputedStyle(document.querySelector('.find')).display") == "none"
    assert tab.run("document.querySelectorAll('svg.chart title').length") > 5


def test_it_prints(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.pdf().startswith(b"%PDF")


@pytest.mark.slow
def test_364_tasks_stay_responsive(tab: Tab, tmp_path: Path) -> None:
    names = [f"place {number}" for number in range(364)]
    run = made_up_run(tmp_path / "run", names, each=20, sealed="none", margin=0.05)
    tab.open(write_report(run, tmp_path / "page.html")[0])
    took = tab.run(
        "(() => { const t = performance.now(); document.querySelector('#task-table thead button').click(); "
        "document.body.offsetHeight; return performance.now() - t; })()"
    )
    assert tab.run(FIRST) == sorted(names)
    assert took < 1000
