"""Killed at any moment, a step is taken up by the same command and ends as if nothing had been."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from holdfast.data.retrieve.clean import clean
from holdfast.data.retrieve.download import FetchLimits
from holdfast.data.retrieve.fetch import fetch
from holdfast.data.retrieve.judge import judge_none
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.words import Words
from tests.data.retrieve.web import PATIENCE, chat, pictures_handler, verdict_text

KILLING = Path(__file__).parent / "killing.py"


@pytest.fixture
def killed(tmp_path: Path, tried: Callable[..., None]) -> Callable[..., int]:
    """Kill a step at each of its events: how many there were."""

    def kill(step: str, base: Path, argument: object = "") -> int:
        words = [sys.executable, str(KILLING), step, str(base), str(tmp_path / "work"), str(argument)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert not result["problems"], done.stderr
        tried("signals", result["kills"])
        return result["kills"]

    return kill


@pytest.fixture
def source(write_captions, serve, make_picture) -> Path:
    """Captions of pictures that a server has: two targets, one link that is dead, one negative."""
    server = serve(pictures_handler(make_picture))
    rows = [(f"{server.url}/good/{i}", f"fog {i}") for i in range(2)] + [(f"{server.url}/status/404", "fog lost")]
    return write_captions([*rows, (f"{server.url}/good/2", "sun 2")])


def after(step: str, source: Path, out: Path) -> Path:
    """A folder in which everything up to a step was done."""
    search(str(source), SearchQuery(Words("fog")), out, threads=1)
    steps = {
        "judge": lambda: judge_none(out),
        "fetch": lambda: fetch(out, FetchLimits(total_seconds=PATIENCE, allow_private=True)),
        "clean": lambda: clean(out, []),
    }
    for name, run in steps.items():
        if step != "search":
            run()
        if step in ("search", name):
            break
    return out


def test_search(source: Path, killed, tmp_path: Path) -> None:
    assert killed("search", tmp_path / "nothing", source) > 15


@pytest.mark.slow
def test_search_anew_in_a_folder_where_all_is_done(source: Path, killed, tmp_path: Path) -> None:
    out = tmp_path / "base"
    search(str(source), SearchQuery(Words("sun")), out, threads=1)
    judge_none(out)
    assert killed("search", out, source) > 15


@pytest.mark.parametrize("step", ["judge-none", pytest.param("judge-similarity", marks=pytest.mark.slow)])
def test_judge(step: str, source: Path, killed, tmp_path: Path) -> None:
    assert killed(step, after("search", source, tmp_path / "base")) > 8


def test_judge_by_an_endpoint(source: Path, serve, killed, tmp_path: Path) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return chat(verdict_text(await request.json(), "yes"))

    assert killed("judge", after("search", source, tmp_path / "base"), f"{serve(handle).url}/v1") > 15


@pytest.mark.slow
def test_fetch(source: Path, killed, tmp_path: Path) -> None:
    assert killed("fetch", after("judge", source, tmp_path / "base")) > 40


@pytest.mark.slow
def test_fetch_in_place_of_other_downloads(source: Path, killed, tmp_path: Path) -> None:
    assert killed("fetch-restart", after("fetch", source, tmp_path / "base")) > 45


@pytest.mark.slow
def test_fetch_of_pictures_that_img2dataset_downloaded(source: Path, killed, tmp_path: Path, make_picture) -> None:
    base = after("judge", source, tmp_path / "base")
    links = [row["url"] for row in _rows(base)]
    theirs = tmp_path / "theirs" / "00000"
    theirs.mkdir(parents=True)
    for number, link in enumerate(links[:2]):
        (theirs / f"{number}.json").write_text(json.dumps({"url": link}))
        (theirs / f"{number}.jpg").write_bytes(make_picture(number))
    assert killed("adopt", base, theirs.parent) > 40


def _rows(out: Path) -> list[dict[str, str]]:
    import pyarrow.parquet as pq

    return pq.read_table(out / "judge" / "judged.parquet").to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("done_before", [False, True])
def test_clean(source: Path, killed, tmp_path: Path, done_before: bool) -> None:
    """Done before, the manifest must not go on claiming what a killed repetition has already taken away."""
    base = after("clean" if done_before else "fetch", source, tmp_path / "base")
    assert killed("clean", base) > 30
