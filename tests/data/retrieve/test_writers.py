"""One writer at a time, and folders that others have damaged: nothing waits for ever, nothing wedges."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from holdfast.data.retrieve.clean import clean
from holdfast.data.retrieve.download import FetchLimits
from holdfast.data.retrieve.fetch import fetch
from holdfast.data.retrieve.img2dataset import adopt
from holdfast.data.retrieve.judge import judge_by_endpoint, judge_none
from holdfast.data.retrieve.manifest import RetrievalFolder
from holdfast.data.retrieve.question import Question
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.words import Words
from holdfast.errors import Exit, HoldfastError, UserError
from holdfast.files import is_temporary
from tests.data.retrieve.web import PATIENCE, Gate, Web, chat, config_of, pictures_handler, verdict_text, wait_until
from tests.processes import Forked

LIMITS = FetchLimits(connect_seconds=PATIENCE, total_seconds=PATIENCE, allow_private=True)
ROWS = 12


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pictures(serve, make_picture, gate: Gate) -> Web:
    return serve(pictures_handler(make_picture, gate))


@pytest.fixture
def prepare(write_captions, tmp_path: Path) -> Callable[..., Path]:
    """A folder in which these links were found and kept."""

    def make(links: list[str], name: str = "out") -> Path:
        source = write_captions([(link, f"fog {i}") for i, link in enumerate(links)], f"{name}.parquet")
        search(str(source), SearchQuery(Words("fog")), tmp_path / name, threads=1)
        judge_none(tmp_path / name)
        return tmp_path / name

    return make


def holdfast(*words: object) -> Forked:
    return Forked("-m", "holdfast", "retrieve", *words)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_second_writer_is_told_who_the_first_is(
    pictures: Web, prepare, gate: Gate, tmp_path: Path, tried: Callable[..., None]
) -> None:
    """Every subcommand that writes, while a fetch is under way; nothing is changed, and the fetch ends as it should."""
    out = prepare([f"{pictures.url}/held/{i}" for i in range(3)])
    source = tmp_path / "out.parquet"
    first = holdfast("fetch", out, "--allow-private", "--timeout", PATIENCE, "--quiet")
    wait_until(lambda: pictures.hits.total() == 3, first)
    before = contents(out)
    commands = [
        ("fetch", out, "--allow-private"),
        ("fetch", out, "--from-img2dataset", tmp_path),
        ("search", source, "--about", "sun", "--out", out),
        ("judge", out, "--encoder", "none"),
        ("all", source, "--about", "fog", "--out", out),
    ]
    for words in commands:
        tried("faults")
        second = holdfast(*words)
        _, error = second.communicate()
        assert second.returncode == Exit.USER, (words, error)
        assert f"process {first.pid} on " in error
        assert "retrieve fetch" in error
        assert "Traceback" not in error
    assert contents(out) == before
    gate.open()
    assert first.wait() == 0
    assert RetrievalFolder(out).need("fetch")["counts"]["images"] == 3
    assert pictures.hits.total() == 3


def test_clean_waits_its_turn_too(pictures: Web, prepare, tried) -> None:
    out = prepare([f"{pictures.url}/good/{i}" for i in range(2)])
    fetch(out, LIMITS)
    with RetrievalFolder(out).writing():
        second = holdfast("clean", out)
        _, error = second.communicate()
    tried("faults")
    assert second.returncode == Exit.USER
    assert f"process {os.getpid()} on " in error
    assert clean(out, [])["counts"]["target"] == 2


def test_a_mistake_leaves_no_folder_behind(write_captions, tmp_path: Path) -> None:
    source = write_captions(["fog"])
    with pytest.raises(UserError, match="--memory"):
        search(str(source), SearchQuery(Words("fog")), tmp_path / "made" / "by", memory="much")
    for step in (judge_none, lambda out: fetch(out, LIMITS), lambda out: clean(out, [])):
        with pytest.raises(UserError, match="no finished"):
            step(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


class Stop(Exception):  # noqa: N818
    """Stands for whatever ends a run."""


def stopped_fetch(pictures: Web, out: Path, gate: Gate) -> Path:
    """A fetch that was stopped with every row but the last in the journal: that journal."""

    def stop(settled: int, total: int, images: int) -> None:
        if settled == total - 1:
            raise Stop

    with pytest.raises(Stop):
        fetch(out, LIMITS, progress=stop)
    gate.open()
    pictures.hits.clear()
    return out / "fetch" / "shard-00000.journal"


def interleaved(a: bytes, b: bytes, draw: random.Random) -> bytes:
    """What two writers make of two lines when neither waits for the other."""
    cut, other = draw.randint(1, len(a) - 2), draw.randint(1, len(b) - 2)
    return a[:cut] + b[:other] + a[cut:] + b[other:]


def changed(line: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(line) | changes).encode() + b"\n"


def changed_record(line: bytes, **changes: object) -> bytes:
    return changed(line, record=json.loads(line)["record"] | changes)


RUINS: dict[str, Callable[[list[bytes], random.Random], list[bytes]]] = {
    "interleaved": lambda lines, draw: [interleaved(lines[0], lines[1], draw), *lines[2:]],
    "interleaved in many places": lambda lines, draw: [
        interleaved(*lines[i : i + 2], draw) for i in range(0, ROWS - 1 - (ROWS - 1) % 2, 2)
    ],
    "garbage between": lambda lines, draw: [lines[0], draw.randbytes(500).replace(b"\n", b"") + b"\n", *lines[1:]],
    "empty lines": lambda lines, draw: [lines[0], b"\n\n", *lines[1:]],
    "no object": lambda lines, draw: [b"[]\n", b"null\n", b"7\n", *lines],
    "nested too deeply": lambda lines, draw: [b"[" * 100_000 + b"\n", b'{"record":' * 50_000 + b"\n", *lines],
    "places in the blob of the other writer": lambda lines, draw: [
        changed(lines[0], offset=json.loads(lines[0])["offset"] + 7),
        changed(lines[1], length=3),
        *lines[2:],
    ],
    "places that are none": lambda lines, draw: [
        changed(lines[0], offset=10**15),
        changed(lines[1], offset=-1),
        changed(lines[2], length=10**18),
        changed(lines[3], offset="0"),
        *lines[4:],
    ],
    "rows of another selection": lambda lines, draw: [
        changed_record(lines[0], key="000000999"),
        changed_record(lines[1], url="http://other.test/"),
        changed_record(lines[2], status=5),
        changed_record(lines[3], more=1),
        changed_record(lines[4], sha256=None),
        *lines[5:],
    ],
    "lines twice": lambda lines, draw: [line for line in lines for _ in range(2)],
    "cut short": lambda lines, draw: [*lines[:-1], lines[-1][:-40]],
    "everything": lambda lines, draw: [draw.randbytes(20_000)],
    "nothing": lambda lines, draw: [],
}


@pytest.mark.parametrize("kind", RUINS)
def test_a_ruined_journal_costs_downloads_and_nothing_else(
    pictures: Web, prepare, gate: Gate, tried: Callable[..., None], kind: str, tmp_path: Path
) -> None:
    """Lines that cannot be read are passed over, counted and fetched again; the shards are those of a whole run."""
    links = [f"{pictures.url}/good/{i}" for i in range(ROWS - 1)] + [f"{pictures.url}/held/{ROWS}"]
    out, whole = prepare(links), tmp_path / "whole"
    shutil.copytree(out, whole)
    journal = stopped_fetch(pictures, out, gate)
    fetch(whole, LIMITS)
    lines = journal.read_bytes().splitlines(keepends=True)
    ruined = RUINS[kind](lines, random.Random(kind))
    journal.write_bytes(b"".join(ruined))
    good = {line for line in ruined if line in lines}
    pictures.hits.clear()
    notes: list[str] = []
    section = fetch(out, LIMITS, note=notes.append)
    tried("faults")
    assert section == RetrievalFolder(whole).need("fetch")
    assert contents(out / "fetch") == contents(whole / "fetch")
    assert pictures.hits.total() == ROWS - len(good), "what can be read is not fetched again"
    passed_over = kind not in ("lines twice", "cut short", "nothing")
    assert len(notes) == passed_over
    assert all("cannot be read; what they told of is fetched again" in note for note in notes)
    assert clean(out, [])["counts"]["target"] == clean(whole, [])["counts"]["target"]


@pytest.mark.parametrize("left", [0, 100])
def test_a_blob_that_lost_its_end_is_fetched_again(pictures: Web, prepare, gate: Gate, tried, left: int) -> None:
    links = [f"{pictures.url}/good/{i}" for i in range(ROWS - 1)] + [f"{pictures.url}/held/{ROWS}"]
    out = prepare(links)
    journal = stopped_fetch(pictures, out, gate)
    blob = journal.with_suffix(".blob")
    os.truncate(blob, left)
    tried("faults")
    assert fetch(out, LIMITS)["counts"]["images"] == ROWS
    assert pictures.hits.total() == ROWS
    assert sorted(path.name for path in (out / "fetch").iterdir()) == [
        "plan.json",
        "shard-00000.jsonl",
        "shard-00000.tar",
    ]


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "empty", "pipe"])
def test_shards_that_are_damaged_are_said_and_fetched_again(pictures: Web, prepare, tried, damage: str) -> None:
    links = [f"{pictures.url}/good/{i}" for i in range(3)] + [f"{pictures.url}/status/404"]
    out = prepare(links)
    whole = fetch(out, LIMITS)
    tar = out / "fetch" / "shard-00000.tar"
    content = tar.read_bytes()
    tar.unlink()
    if damage == "pipe":
        os.mkfifo(tar)
    elif damage != "missing":
        middle = bytes(reversed(content[1024:1100]))
        new = {"cut": content[:1500], "changed": content[:1024] + middle + content[1100:], "empty": b""}
        tar.write_bytes(new[damage])
    tried("faults")
    with pytest.raises(UserError, match="is not as it was written") as problem:
        clean(out, [])
    assert "run `holdfast retrieve fetch` again" in problem.value.do
    tar.unlink(missing_ok=True)
    assert fetch(out, LIMITS) == whole
    assert tar.read_bytes() == content
    assert pictures.hits["/status/404"] == 1
    assert clean(out, [])["counts"]["target"] == 3


def test_a_table_that_is_damaged_is_fetched_again(pictures: Web, prepare, tried) -> None:
    out = prepare([f"{pictures.url}/good/{i}" for i in range(4)])
    whole = fetch(out, LIMITS)
    table = out / "fetch" / "shard-00000.jsonl"
    lines = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(lines[0] + b"garbage\n" + b"[" * 50_000 + b"\n" + lines[3])
    tried("faults")
    with pytest.raises(UserError, match="not those of the last whole run"):
        clean(out, [])
    pictures.hits.clear()
    notes: list[str] = []
    assert fetch(out, LIMITS, note=notes.append) == whole
    assert notes[0].startswith("2 lines")
    assert pictures.hits.total() == 2
    assert table.read_bytes() == b"".join(lines)


def test_a_fetch_that_was_stopped_halfway_is_not_cleaned(pictures: Web, prepare, tried) -> None:
    """A second fetch, for what failed in the first, was stopped after it had written the tar and not yet the table."""
    out = prepare([f"{pictures.url}/flaky/1", f"{pictures.url}/good/2"])
    fetch(out, LIMITS)
    table = out / "fetch" / "shard-00000.jsonl"
    before = table.read_bytes()
    manifest = (out / "manifest.json").read_bytes()
    fetch(out, LIMITS)
    tried("faults")
    (out / "manifest.json").write_bytes(manifest)
    with pytest.raises(UserError, match="not those of the last whole run"):
        clean(out, [])
    table.write_bytes(before)  # the tar holds more than the table tells of
    assert clean(out, [])["counts"]["target"] == 1


def test_a_table_of_a_step_that_was_stopped_is_not_taken_for_another_s(searched, write_captions, tried) -> None:
    out = searched(["fog 1", "fog 2"])
    judge_none(out)
    folder = RetrievalFolder(out)
    other = searched(["fog 3"], "other")
    judge_none(other)
    tried("faults", 3)
    good = folder.judged.read_bytes()
    folder.judged.write_bytes(RetrievalFolder(other).judged.read_bytes())
    with pytest.raises(UserError, match="not as `holdfast retrieve judge` left it"):
        fetch(out, LIMITS)
    folder.judged.write_bytes(good)
    folder.negatives.unlink()
    with pytest.raises(UserError, match="not as `holdfast retrieve search` left it"):
        fetch(out, LIMITS)
    folder.found.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not as `holdfast retrieve search` left it"):
        judge_none(out)


def test_what_killed_writers_left_is_cleared_away(pictures: Web, prepare, tmp_path: Path) -> None:
    out = prepare([f"{pictures.url}/good/1"])
    fetch(out, LIMITS)
    clean(out, [])
    unharmed = contents(out)
    stray = [out / folder / ".name.abc123.tmp" for folder in (".", "search", "judge", "fetch", "clean")]
    for path in stray:
        path.write_bytes(b"half")
    rubbish = out / ".fetch.xyz.tmp" / "fetch"
    rubbish.mkdir(parents=True)
    (rubbish / "shard-00000.tar").write_bytes(b"old")
    (out / "fetch" / "shard-00000.blob").write_bytes(b"pictures of a journal that is gone")
    parts = out / "search" / "parts-0123456789ab"
    parts.mkdir()
    (parts / "000000.parquet").write_bytes(b"part")
    search(str(tmp_path / "out.parquet"), SearchQuery(Words("fog")), out, threads=1)
    fetch(out, LIMITS)
    assert contents(out) == unharmed
    assert not any(is_temporary(path) for path in out.rglob("*"))


def special(kind: str, path: Path) -> None:
    """Something at ``path`` that is no regular file, or no reasonable one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or path.is_symlink():
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 42)  # four terabytes, none of them on the disk


KINDS = ("pipe", "device", "folder", "huge")


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_none_do_not_hold_up_a_step(
    searched, serve, write_captions, tmp_path: Path, tried: Callable[..., None], kind: str
) -> None:
    """As captions, manifest, tables between the steps, and cache: one sentence each, at once."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return chat(verdict_text(await request.json(), "yes"))

    config, question = config_of(serve(handle)), Question("strict", "fog")
    special(kind, tmp_path / "strange.parquet")
    with pytest.raises(UserError):
        search(str(tmp_path / "strange.parquet"), SearchQuery(Words("fog")), tmp_path / "none", threads=1)
    out = searched(["fog"])
    special(kind, tmp_path / "cache.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        judge_by_endpoint(out, question, config, cache=tmp_path / "cache.jsonl")
    special(kind, RetrievalFolder(out).answers)
    with pytest.raises(UserError, match="cannot be read"):
        judge_by_endpoint(out, question, config)
    judge_none(out)
    folder = RetrievalFolder(out)
    if kind != "huge":  # which would be hashed to its end: an hour for nothing
        for path, name in ((folder.negatives, "search"), (folder.judged, "judge")):
            special(kind, path)
            with pytest.raises(UserError, match=f"not as `holdfast retrieve {name}` left it"):
                fetch(out, LIMITS)
        special(kind, folder.found)
        with pytest.raises(UserError, match="not as `holdfast retrieve search` left it"):
            judge_none(out)
    special(kind, folder.manifest)
    with pytest.raises(UserError):
        judge_none(out)
    with pytest.raises(UserError):
        search(str(tmp_path / "out.parquet"), SearchQuery(Words("fog")), out, threads=1)
    tried("bad inputs", 8)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_none_do_not_hold_up_a_fetch(pictures: Web, prepare, tried, kind: str) -> None:
    out = prepare([f"{pictures.url}/good/1"])
    fetch(out, LIMITS)
    store = out / "fetch"
    for name in ("shard-00000.journal", "shard-00000.jsonl"):
        special(kind, store / name)
        with pytest.raises(UserError, match="cannot be read"):
            fetch(out, LIMITS)
        os.rmdir(store / name) if kind == "folder" else os.unlink(store / name)
    special(kind, store / "plan.json")
    with pytest.raises(UserError, match="another selection"):
        fetch(out, LIMITS)
    assert fetch(out, LIMITS, restart=True)["counts"]["images"] == 1
    if kind in ("pipe", "device"):
        special(kind, store / "shard-00000.blob")
        assert fetch(out, LIMITS)["counts"]["images"] == 1
    tried("bad inputs", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_none_do_not_hold_up_img2dataset_s_output(
    prepare, make_picture, tmp_path: Path, tried, kind: str
) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "00000").mkdir(parents=True)
    (theirs / "00000" / "1.json").write_text(json.dumps({"url": "http://a.test/1"}))
    (theirs / "00000" / "1.jpg").write_bytes(make_picture(1))
    (theirs / "00000" / "2.json").write_text(json.dumps({"url": "http://a.test/2"}))
    special(kind, theirs / "00000" / "2.jpg")
    if kind != "huge":
        special(kind, theirs / "00000" / "3.json")
        special(kind, theirs / "00001.tar")
    out = prepare(["http://a.test/1", "http://a.test/2"])
    counts = adopt(theirs, out, LIMITS)["counts"]
    lost = "too-large" if kind == "huge" else "img2dataset-failed"
    assert (counts["images"], counts["lost_because"]) == (1, {lost: 1})
    if kind == "huge":
        again = prepare(["http://a.test/1"], "again")
        special(kind, theirs / "00000" / "3.json")
        with pytest.raises(UserError, match="cannot be read"):
            adopt(theirs, again, LIMITS)
    tried("bad inputs", 3)


def test_a_small_tar_that_promises_terabytes_is_read_in_no_time(prepare, tmp_path: Path, tried) -> None:
    """A sparse member of an old GNU tar: no data, any size."""
    header = tarfile.TarInfo("000000000.jpg")
    header.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[386:482] = bytes(96)  # no pieces of data
    block[483:495] = b"\x80" + (1 << 41).to_bytes(11, "big")  # the size when unpacked
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    about = json.dumps({"url": "http://a.test/1"}).encode()
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("000000000.json")
        info.size = len(about)
        tar.addfile(info, io.BytesIO(about))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "00000.tar").write_bytes(bytes(block) + sink.getvalue())
    with tarfile.open(theirs / "00000.tar") as tar:
        assert tar.getmembers()[0].size == 1 << 41
    tried("hostile archives")
    assert adopt(theirs, prepare(["http://a.test/1"]), LIMITS)["counts"]["lost_because"] == {"too-large": 1}


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"url":' * 50_000, b"\xff\xfe", b"null", b"[]", b"{}", b""])
def test_json_of_img2dataset_that_is_none_is_said(prepare, tmp_path: Path, tried, content: bytes) -> None:
    theirs = tmp_path / "theirs" / "00000"
    theirs.mkdir(parents=True)
    (theirs / "1.json").write_bytes(content)
    tried("bad inputs")
    with pytest.raises(UserError):
        adopt(theirs.parent, prepare(["http://a.test/1"]), LIMITS)


def manifests(good: dict) -> list[object]:
    """What can become of a manifest."""
    section = good["steps"]["search"]
    broken: list[object] = [None, [], 7, "x", {}, {"format": 1}, {"format": 2, "steps": {}}]
    broken += [{"format": 1, "steps": steps} for steps in ([], None, {"search": None}, {"search": []}, {"other": {}})]
    broken += [
        {"format": 1, "steps": {"search": {k: v for k, v in section.items() if k != key}}}
        for key in ("request", "query", "hashes", "counts")
    ]
    broken += [
        {"format": 1, "steps": {"search": section | {"query": query}}}
        for query in ({}, {"about": "fog"}, {"about": 1, "ratio": 1}, {"about": "fog", "ratio": "10"})
    ]
    return [*broken, {"format": 1, "steps": {"search": section, "judge": {}}}]


def test_a_manifest_that_is_none_is_said(searched, tmp_path: Path, tried) -> None:
    out = searched(["fog"])
    manifest = out / "manifest.json"
    good = manifest.read_bytes()
    texts = [json.dumps(value).encode() for value in manifests(json.loads(good))]
    for content in (*texts, b"[" * 100_000, b"\xff", b"", good[:50]):
        tried("bad inputs")
        manifest.write_bytes(content)
        for step in (judge_none, lambda out: fetch(out, LIMITS), lambda out: clean(out, [])):
            with pytest.raises(UserError):
                step(out)
        with pytest.raises(UserError):
            search(str(tmp_path / "out.parquet"), SearchQuery(Words("fog")), out, threads=1)
    manifest.unlink()
    search(str(tmp_path / "out.parquet"), SearchQuery(Words("fog")), out, threads=1)
    assert manifest.read_bytes() == good


def test_a_disk_that_fills_up_is_said_and_nothing_is_lost(pictures: Web, prepare, monkeypatch, tried) -> None:
    """At each write to the journal in turn: the run stops with a sentence, and the next one goes on."""
    import holdfast.data.retrieve.shards as module

    links = [f"{pictures.url}/good/{i}" for i in range(3)]
    real = module.canonical_json
    for fails_at in range(3):
        out = prepare(links, f"full-{fails_at}")
        written: list[int] = []

        def full(value: object, written: list[int] = written, fails_at: int = fails_at) -> str:
            written.append(1)
            if len(written) == fails_at + 1:
                raise OSError(28, "No space left on device")
            return real(value)

        monkeypatch.setattr(module, "canonical_json", full)
        tried("faults")
        with pytest.raises(HoldfastError, match="cannot write") as problem:
            fetch(out, FetchLimits(concurrency=1, total_seconds=PATIENCE, allow_private=True))
        assert "No space left" in problem.value.found
        monkeypatch.setattr(module, "canonical_json", real)
        pictures.hits.clear()
        assert fetch(out, LIMITS)["counts"]["images"] == 3
        assert pictures.hits.total() == 3 - fails_at
