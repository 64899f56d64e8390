from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.data.retrieve.manifest import RetrievalFolder
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.words import Words
from holdfast.errors import UserError
from tests.data.retrieve.web import wait_until


def contains_word(caption: str, word: str) -> bool:
    """Whole word, any case, written as a plain loop over characters, without a regular expression."""

    def in_word(char: str) -> bool:
        return char == "_" or unicodedata.category(char)[0] in "LMN"

    caption, word = caption.lower(), word.lower()
    start = caption.find(word)
    while start >= 0:
        end = start + len(word)
        left = start == 0 or not in_word(caption[start - 1])
        right = end == len(caption) or not in_word(caption[end])
        if left and right:
            return True
        start = caption.find(word, start + 1)
    return False


def found_texts(out: Path) -> list[str]:
    return pq.read_table(RetrievalFolder(out).found)["text"].to_pylist()


def negative_texts(out: Path) -> list[str]:
    return pq.read_table(RetrievalFolder(out).negatives)["text"].to_pylist()


@pytest.mark.shared_data
@pytest.mark.parametrize(
    "word", ["foggy", "sea", "Snow", "foto", "cor", "rio", "déco", "für", "café", "new york"], ids=lambda word: word
)
def test_counts_equal_a_plain_loop(shared: Path, tmp_path: Path, word: str) -> None:
    source = shared / "laion-style-10k.parquet"
    section = search(str(source), SearchQuery(Words(word)), tmp_path, threads=1)
    captions = pq.read_table(source)["TEXT"].to_pylist()
    expected = [text for text in captions if contains_word(text, word)]
    assert section["counts"]["found"] == len(expected)
    assert found_texts(tmp_path) == expected
    assert section["counts"]["negatives"] == min(10 * len(expected), section["counts"]["negatives"])
    assert not any(word.lower() in text.lower() for text in negative_texts(tmp_path))


@pytest.mark.shared_data
@pytest.mark.parametrize("word", ["foto", "cor", "rio"])
def test_the_words_above_tell_unicode_boundaries_from_ascii_ones(shared: Path, word: str) -> None:
    """The check above is worth something: a boundary that knows ASCII only counts otherwise."""
    captions = pq.read_table(shared / "laion-style-10k.parquet")["TEXT"].to_pylist()
    ascii_count = sum(re.search(rf"\b{word}\b", text, re.IGNORECASE | re.ASCII) is not None for text in captions)
    assert ascii_count != sum(contains_word(text, word) for text in captions)


@pytest.mark.parametrize(
    ("caption", "word", "expected"),
    [
        ("A FOGGY day", "foggy", True),
        ("foggy", "Foggy", True),
        ("foggyness", "foggy", False),
        ("éfoggy", "foggy", False),  # RE2's \\b sees a boundary after é
        ("foggyé", "foggy", False),
        ("foggy\u0301 marks", "foggy", False),  # a combining accent belongs to the letter before it
        ("foggy_road.jpg", "foggy", False),
        ("foggy2", "foggy", False),
        ("foggy٣", "foggy", False),  # a digit of another script
        ("foggy-road", "foggy", True),
        ("«foggy»", "foggy", True),
        ("туман над рекой", "туман", True),
        ("Туманный", "туман", False),
        ("cafe\u0301 noir", "café", True),  # written in two code points
        ("Café", "cafe\u0301", True),
        ("大雾天气", "雾", True),  # no spaces in this script, so no boundary is asked for
        ("dressing  room", "dressing room", True),
        ("dressing\u00a0room", "dressing room", True),
        ("dressing roomy", "dressing room", False),
        ("a c++ book", "c++", True),
        ("a.b", "a.b", True),
        ("aXb", "a.b", False),
        ("ΟΜΊΧΛΗΣ", "ομίχλης", True),
    ],
)
def test_what_a_word_is(write_captions, tmp_path: Path, caption: str, word: str, expected: bool) -> None:
    source = write_captions([caption, "something else"])
    section = search(str(source), SearchQuery(Words(word)), tmp_path / "out", threads=1)
    assert section["counts"]["found"] == int(expected)


def test_synonyms_exclusions_and_filters_are_counted(write_captions, tmp_path: Path) -> None:
    captions = ["foggy road", "mist at dawn", "foggy glass", "foggy small", "foggy unsafe", "foggy unlike", "sunny"]
    source = write_captions(
        captions,
        WIDTH=[300, 300, 300, 90, 300, 300, 300],
        HEIGHT=[300] * 7,
        similarity=[0.4, 0.4, 0.4, 0.4, 0.4, 0.1, 0.4],
        NSFW=["UNLIKELY", "UNSURE", "UNLIKELY", "UNLIKELY", "NSFW", "UNLIKELY", "UNLIKELY"],
        LICENSE=["CC", None, None, None, None, None, None],
    )
    query = SearchQuery(Words("foggy", ("mist",), ("foggy glass",)), min_side=256, min_similarity=0.3)
    counts = search(str(source), query, tmp_path / "out", threads=1)["counts"]
    assert found_texts(tmp_path / "out") == ["foggy road", "mist at dawn"]
    assert (counts["matched"], counts["excluded"], counts["filtered"], counts["found"]) == (6, 1, 3, 2)
    assert negative_texts(tmp_path / "out") == ["sunny"]
    assert pq.read_table(RetrievalFolder(tmp_path / "out").found)["license"].to_pylist() == ["CC", None]
    strict = SearchQuery(Words("mist"), nsfw="unlikely")
    assert search(str(source), strict, tmp_path / "strict", threads=1)["counts"]["found"] == 0


def test_negatives_are_deterministic_distinct_and_free_of_the_words(write_captions, tmp_path: Path) -> None:
    captions = (
        [f"picture {i // 2} of something" for i in range(4000)] + [f"fogs {i}" for i in range(4000)] + ["fog"] * 5
    )
    source = write_captions(captions)
    first = search(str(source), SearchQuery(Words("fog")), tmp_path / "a", threads=1)
    again = search(str(source), SearchQuery(Words("fog")), tmp_path / "b", threads=2)
    assert first == again
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()
    negatives = negative_texts(tmp_path / "a")
    assert len(negatives) == len(set(negatives)) == 50
    assert not any("fog" in text for text in negatives), "not even inside another word: fogs is no negative of fog"
    other = search(str(source), SearchQuery(Words("fog"), seed=1), tmp_path / "c", threads=1)
    assert other["hashes"]["found"] == first["hashes"]["found"]
    assert other["hashes"]["negatives"] != first["hashes"]["negatives"]


def test_many_are_needed_from_few(write_captions, tmp_path: Path) -> None:
    """All that are left are taken when there are fewer than asked for, whatever the first guess of the share was."""
    captions = ["fog"] * 60 + [f"picture {i}" for i in range(300)] + ["picture 7"] * 50
    counts = search(str(write_captions(captions)), SearchQuery(Words("fog")), tmp_path / "out", threads=1)["counts"]
    assert counts["negatives"] == 300
    assert sorted(negative_texts(tmp_path / "out")) == sorted({f"picture {i}" for i in range(300)})


def test_negatives_come_from_many_blocks_and_every_block_is_as_likely(tmp_path: Path, monkeypatch) -> None:
    from holdfast.data.retrieve import negatives as module

    monkeypatch.setattr(module, "BLOCK_ROWS", 100)
    captions = [f"picture {i}" for i in range(20_000)] + ["fog"] * 40
    path = tmp_path / "meta.parquet"
    table = pa.table({"URL": [f"http://a.test/{i}" for i in range(len(captions))], "TEXT": captions})
    pq.write_table(table, path, row_group_size=1000)
    used: set[int] = set()
    for seed in range(12):
        out = tmp_path / str(seed)
        search(str(path), SearchQuery(Words("fog"), seed=seed), out, threads=1)
        rows = pq.read_table(RetrievalFolder(out).negatives)["row"].to_pylist()
        blocks = {row // 100 for row in rows}
        assert len(rows) == 400
        assert 14 <= len(blocks) <= 32
        used |= blocks
    assert len(used) > 100, "200 blocks, 12 draws of 16 or more: most blocks are drawn from by some seed"


def test_one_file_and_many_give_the_same_rows(write_captions, tmp_path: Path) -> None:
    captions = [f"picture {i}{' fog' if i % 7 == 0 else ''}" for i in range(700)]
    whole = write_captions(captions)
    table = pq.read_table(whole)
    for part in range(7):
        path = tmp_path / "parts" / f"sub{part % 2}" / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(part * 100, 100), path)
    query = SearchQuery(Words("fog"))
    first = search(str(whole), query, tmp_path / "one", threads=1)["counts"]
    folder = search(str(tmp_path / "parts"), query, tmp_path / "folder", threads=1)["counts"]
    pattern = search(str(tmp_path / "parts" / "**" / "*.parquet"), query, tmp_path / "glob", threads=1)["counts"]
    assert first == folder == pattern
    assert set(found_texts(tmp_path / "one")) == set(found_texts(tmp_path / "folder"))
    assert negative_texts(tmp_path / "folder") == negative_texts(tmp_path / "glob")


def test_ratio_zero_draws_no_negatives(write_captions, tmp_path: Path) -> None:
    source = write_captions(["fog", "sun"])
    counts = search(str(source), SearchQuery(Words("fog"), ratio=0), tmp_path / "out", threads=1)["counts"]
    assert (counts["found"], counts["negatives"]) == (1, 0)


def test_rows_without_url_or_text_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "meta.parquet"
    pq.write_table(pa.table({"URL": ["http://a.test/1", None, "http://a.test/3"], "TEXT": ["fog", "fog", None]}), path)
    counts = search(str(path), SearchQuery(Words("fog")), tmp_path / "out", threads=1)["counts"]
    assert (counts["found"], counts["negatives"]) == (1, 0)


def test_a_stopped_search_goes_on_with_the_next_file(write_captions, tmp_path: Path, monkeypatch) -> None:
    for part in range(4):
        write_captions([f"fog {part} {i}" for i in range(5)], name=f"meta/{part}.parquet")
    scanned: list[str] = []
    from holdfast.data.retrieve import search as module

    real = module.scan_files

    def breaks(connection, group, query):
        ((_, file),) = group
        scanned.append(file.name)
        if file.name == "2.parquet" and scanned.count("2.parquet") == 1:
            raise KeyboardInterrupt
        yield from real(connection, group, query)

    monkeypatch.setattr(module, "scan_files", breaks)
    monkeypatch.setattr(module, "_GROUP_ROWS", 5)
    query = SearchQuery(Words("fog"))
    with pytest.raises(KeyboardInterrupt):
        search(str(tmp_path / "meta"), query, tmp_path / "out", threads=1)
    assert RetrievalFolder(tmp_path / "out").step("search") is None
    section = search(str(tmp_path / "meta"), query, tmp_path / "out", threads=1)
    assert scanned == ["0.parquet", "1.parquet", "2.parquet", "2.parquet", "3.parquet"]
    assert section["counts"]["found"] == 20
    assert not list((tmp_path / "out" / "search").glob("parts-*"))
    search(str(tmp_path / "meta"), query, tmp_path / "out", threads=1)
    assert len(scanned) == 5, "a finished search is not made again"


def test_killed_and_resumed_ends_with_the_same_manifest(write_captions, tmp_path: Path) -> None:
    for part in range(6):
        write_captions(
            [f"fog {part} {i}" for i in range(3)] + [f"sun {part} {i}" for i in range(50)], f"meta/{part}.parquet"
        )
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from holdfast.data.retrieve import search as module\n"
        "from holdfast.data.retrieve.words import Words\n"
        "real, module._GROUP_ROWS = module.scan_files, 60\n"
        "groups = 0\n"
        "def stopping(*given):\n"
        "    global groups\n"
        "    yield from real(*given)\n"
        "    groups += 1\n"
        "    if groups == int(sys.argv[3]):\n"
        "        sys.stdin.read()\n"  # for ever: nobody writes there
        "module.scan_files = stopping\n"
        "module.search(sys.argv[1], module.SearchQuery(Words('fog')), Path(sys.argv[2]), threads=1)\n"
    )

    def start(out: Path, stop_at: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", script, str(tmp_path / "meta"), str(out), str(stop_at)]
        return subprocess.Popen(words, stdin=subprocess.PIPE)

    killed = start(tmp_path / "killed", 3)
    wait_until(lambda: len(list((tmp_path / "killed").glob("search/parts-*/*.parquet"))) == 2, killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "manifest.json").exists()
    assert start(tmp_path / "killed", 0).wait() == 0
    assert start(tmp_path / "whole", 0).wait() == 0
    assert (tmp_path / "killed" / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()


def test_progress_reaches_the_number_of_rows(write_captions, tmp_path: Path) -> None:
    source = write_captions(["fog"] * 10)
    seen: list[tuple[int, int]] = []
    search(
        str(source), SearchQuery(Words("fog")), tmp_path / "out", threads=1, progress=lambda *done: seen.append(done)
    )
    assert seen[-1] == (10, 10)


def test_the_manifest_names_query_engine_files_and_no_place(write_captions, tmp_path: Path) -> None:
    source = write_captions(["fog", "sun"])
    search(str(source), SearchQuery(Words("fog", ("mist",))), tmp_path / "out", threads=1)
    text = (tmp_path / "out" / "manifest.json").read_text()
    section = json.loads(text)["steps"]["search"]
    assert section["query"]["about"] == "fog"
    assert section["query"]["also"] == ["mist"]
    assert section["engine"].startswith("duckdb ")
    assert section["files"][0]["rows"] == 2
    assert section["files"][0]["footer"].startswith("sha256:")
    assert str(tmp_path) not in text


def test_mistakes_are_explained(write_captions, tmp_path: Path) -> None:
    source = write_captions(["fog"])
    with pytest.raises(UserError, match="no Parquet file"):
        search(str(tmp_path / "nowhere"), SearchQuery(Words("fog")), tmp_path / "out")
    with pytest.raises(UserError, match="letter or digit"):
        Words("  ")
    with pytest.raises(UserError, match="both looked for and ruled out"):
        Words("fog", (), ("FOG",))
    with pytest.raises(UserError, match="needs a WIDTH column"):
        search(str(source), SearchQuery(Words("fog"), min_side=10), tmp_path / "out")
    with pytest.raises(UserError, match="did you mean 'TEXT'"):
        search(str(source), SearchQuery(Words("fog"), columns={"text": "TEX"}), tmp_path / "out")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="not readable as Parquet"):
        search(str(tmp_path / "bad.parquet"), SearchQuery(Words("fog")), tmp_path / "out")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match="no URL column"):
        search(str(tmp_path / "other.parquet"), SearchQuery(Words("fog")), tmp_path / "out")
    with pytest.raises(UserError, match="--memory"):
        search(str(source), SearchQuery(Words("fog")), tmp_path / "out", memory="much")


def test_a_word_cannot_leave_its_string(write_captions, tmp_path: Path) -> None:
    source = write_captions(["it's fog", "fog"])
    counts = search(str(source), SearchQuery(Words("it's")), tmp_path / "out", threads=1)["counts"]
    assert counts["found"] == 1


@pytest.mark.slow
def test_ray_gives_the_same_manifest(write_captions, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for part in range(5):
        write_captions([f"fog {part}"] + [f"sun {part} {i}" for i in range(40)], name=f"meta/{part}.parquet")
    query = SearchQuery(Words("fog"))
    here = search(str(tmp_path / "meta"), query, tmp_path / "here", threads=1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = search(str(tmp_path / "meta"), query, tmp_path / "cluster", cluster="local")
    assert here == cluster
    assert (tmp_path / "here" / "manifest.json").read_bytes() == (tmp_path / "cluster" / "manifest.json").read_bytes()


def test_without_ray_the_extra_is_named(write_captions, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write_captions(["fog"])
    with pytest.raises(UserError, match=r"holdfast\[ray\]"):
        search(str(source), SearchQuery(Words("fog")), tmp_path / "out", cluster="local")
