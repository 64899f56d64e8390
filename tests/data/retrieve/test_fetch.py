from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import tarfile
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest
import webdataset
from aiohttp import web
from PIL import Image

from holdfast.data.retrieve.download import FetchLimits
from holdfast.data.retrieve.fetch import fetch, open_store_to_read, read_fetched
from holdfast.data.retrieve.images import ImageLimits
from holdfast.data.retrieve.img2dataset import adopt
from holdfast.data.retrieve.judge import judge_none
from holdfast.data.retrieve.manifest import RetrievalFolder
from holdfast.data.retrieve.net import host_of
from holdfast.data.retrieve.scheduler import ByHost
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.shards import Record, Wanted, write_tar
from holdfast.data.retrieve.words import Words
from holdfast.errors import UserError
from tests.data.retrieve.web import PATIENCE, Gate, Web, pictures_handler, wait_until
from tests.processes import Forked

LIMITS = FetchLimits(
    concurrency=64,
    per_host=64,
    connect_seconds=PATIENCE,
    total_seconds=PATIENCE,
    max_bytes=200_000,
    max_redirects=3,
    allow_private=True,
)


@pytest.fixture
def pictures(make_picture):
    server = Web(pictures_handler(make_picture))
    yield server
    server.close()


@pytest.fixture
def prepare(write_captions, tmp_path: Path):
    """A folder in which links were found and kept, and negatives drawn."""

    def make(targets: list[str], negatives: list[str] = (), name: str = "out") -> Path:
        rows = [(url, f"fog number {i}") for i, url in enumerate(targets)]
        rows += [(url, f"sun number {i}") for i, url in enumerate(negatives)]
        source = write_captions(rows, name=f"{name}.parquet")
        search(str(source), SearchQuery(Words("fog")), tmp_path / name, threads=1)
        judge_none(tmp_path / name)
        return tmp_path / name

    return make


def statuses(out: Path) -> dict[str, str]:
    store = open_store_to_read(RetrievalFolder(out), LIMITS)
    return {item.url: item.status for shard in range(store.count) for item in store.finished(shard).values()}


def test_every_kind_of_response_ends_in_a_picture_or_a_reason(pictures: Web, prepare) -> None:
    base = pictures.url
    expected = {
        f"{base}/good/1": "ok",
        f"{base}/png/2": "ok",  # whatever the server calls it
        f"{base}/redirect/3": "ok",
        f"{base}/chain/1": "ok",
        f"{base}/chain/7": "too-many-redirects",
        f"{base}/loop": "too-many-redirects",
        f"{base}/cut/5": "incomplete",
        f"{base}/broken/6": "broken-image",
        f"{base}/huge": "too-large",
        f"{base}/endless": "too-large",
        f"{base}/html": "not-an-image",
        f"{base}/svg": "not-an-image",
        f"{base}/gzip": "compressed",
        f"{base}/optout/7": "opted-out",
        f"{base}/reserved/8": "opted-out",
        f"{base}/status/403": "http-403",
        f"{base}/status/404": "http-404",
        f"{base}/status/500": "http-5xx",
        f"{base}/status/204": "http-204",
        f"{base}/tiny/9": "too-small",
        f"{base}/to?url=ftp://127.0.0.1/x": "scheme",
        f"{base}/to?url=file:///etc/passwd": "scheme",
        "ftp://127.0.0.1/a.jpg": "scheme",
        "file:///etc/passwd": "scheme",
        "javascript:alert(1)": "scheme",
        f"http://user:secret@127.0.0.1:{pictures.port}/good/1": "credentials-in-url",
        "http://": "bad-url",
        "http://[::1": "bad-url",
        "not a link": "scheme",
        "http://é:80]雾[@": "bad-url",  # over which a parser falls
        "http://name.invalid/x.jpg": "dns",
    }
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        expected[f"http://127.0.0.1:{nobody_listens.getsockname()[1]}/x"] = "connection"
        out = prepare(list(expected))
        section = fetch(out, LIMITS, lookup=_only_local)
    assert statuses(out) == expected
    counts = section["counts"]
    assert counts["wanted"] == len(expected), "nothing lost"
    assert counts["images"] == counts["target"] == 4
    reasons = Counter(status for status in expected.values() if status != "ok")
    assert counts["lost_because"] == dict(sorted(reasons.items()))


def _only_local(host: str, port: int, family: int) -> list[tuple[int, str]]:
    if host.endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")
    return [(socket.AF_INET, "127.0.0.1")]


def test_what_does_not_end_in_time_is_given_up(pictures: Web, prepare) -> None:
    """One answer that never begins, one that never ends."""
    expected = {f"{pictures.url}/slow/4": "timeout", f"{pictures.url}/drip": "timeout"}
    out = prepare(list(expected))
    fetch(out, FetchLimits(total_seconds=0.5, connect_seconds=0.5, allow_private=True))
    assert statuses(out) == expected


def test_private_addresses_are_refused_in_links_names_and_redirects(pictures: Web, prepare) -> None:
    strict = FetchLimits(total_seconds=PATIENCE, connect_seconds=PATIENCE)
    port = pictures.port
    private = [
        f"http://127.0.0.1:{port}/good/1",
        f"http://[::1]:{port}/good/1",
        f"http://[::ffff:127.0.0.1]:{port}/good/1",
        f"http://0.0.0.0:{port}/good/1",
        "http://10.0.0.1/x.jpg",
        "http://169.254.169.254/latest/meta-data",
        "http://192.168.1.1/x.jpg",
        "http://100.64.0.1/x.jpg",
        f"http://evil.test:{port}/good/1",  # a name that resolves to this machine
        f"http://mixed.test:{port}/good/1",  # one public address, one private
        f"http://2130706433:{port}/good/1",  # 127.0.0.1 as a number
        f"http://0x7f.1:{port}/good/1",
    ]
    answers = {"mixed.test": ["93.184.216.34", "127.0.0.1"]}

    def lookup(host: str, port: int, family: int) -> list[tuple[int, str]]:
        return [(socket.AF_INET, item) for item in answers.get(host, ["127.0.0.1"])]

    out = prepare([*private, "http://public.example.com:22/x.jpg"])
    fetch(out, strict, lookup=lookup)
    found = statuses(out)
    assert found.pop("http://public.example.com:22/x.jpg") == "port"
    for number in ("2130706433", "0x7f.1"):
        assert found.pop(f"http://{number}:{port}/good/1") == "bad-url"
    assert set(found.values()) == {"private-address"}, found
    assert not pictures.hits, "not one request reached the private server"


def test_a_public_name_that_redirects_inside_is_stopped(pictures: Web, prepare, monkeypatch) -> None:
    """The first hop is let through as if it were public; the second must be checked again."""
    from holdfast.data.retrieve import net

    real, seen = net.is_public, Counter()

    def first_is_public(address: str) -> bool:
        seen[address] += 1
        return True if address == "127.0.0.1" and seen[address] == 1 else real(address)

    monkeypatch.setattr(net, "is_public", first_is_public)
    target = f"http://127.0.0.1:{pictures.port}/good/1"
    link = f"http://outside.test:{pictures.port}/to?url={target}"
    out = prepare([link])
    fetch(out, FetchLimits(total_seconds=PATIENCE), lookup=_only_local)
    assert statuses(out) == {link: "private-address"}
    assert pictures.hits == {"/to": 1}


def test_a_redirect_to_an_address_in_disguise_is_stopped(pictures: Web, prepare, tried) -> None:
    """Also where private addresses are allowed: nothing but a name or a plain address is ever asked for."""
    hosts = ["2130706433", "0177.0.0.1", "127.1", "0", "0x7f.1", "127.0.0.1.", "%31%32%37.0.0.1", "１２７.０.０.１"]
    hosts += ["[::1%25lo]", "[::ffff:127.0.0.1%25lo]"]
    links = [f"{pictures.url}/to?url={quote(f'http://{host}:{pictures.port}/good/1')}" for host in hosts]
    out = prepare(links)
    fetch(out, LIMITS, lookup=_only_local)
    tried("addresses", len(hosts))
    assert statuses(out) == dict.fromkeys(links, "bad-url")
    assert pictures.hits == {"/to": len(hosts)}


def test_a_name_that_changes_its_answer_gains_nothing(pictures: Web, prepare, monkeypatch) -> None:
    """DNS rebinding: the connection goes to the address that was checked; a second answer is never looked at."""
    from holdfast.data.retrieve import net

    monkeypatch.setattr(net, "is_public", lambda address: address == "127.0.0.2")
    asked: list[str] = []

    def rebinding(host: str, port: int, family: int) -> list[tuple[int, str]]:
        asked.append(host)
        return [(socket.AF_INET, "127.0.0.2" if len(asked) == 1 else "127.0.0.1")]

    link = f"http://rebind.test:{pictures.port}/good/1"
    out = prepare([link])
    fetch(out, FetchLimits(total_seconds=PATIENCE, connect_seconds=PATIENCE), lookup=rebinding)
    assert statuses(out) == {link: "connection"}, "nobody listens at the address that was checked"
    assert asked == ["rebind.test"]
    assert not pictures.hits


def test_what_is_stored_is_a_clean_jpeg_with_its_hashes(pictures: Web, prepare, make_picture) -> None:
    import hashlib

    out = prepare([f"{pictures.url}/png/3"])
    fetch(out, LIMITS)
    store = open_store_to_read(RetrievalFolder(out), LIMITS)
    ((record, jpeg),) = read_fetched(store)
    assert record.body_sha256 == hashlib.sha256(make_picture(3, form="PNG")).hexdigest()
    assert record.sha256 == hashlib.sha256(jpeg).hexdigest()
    assert record.source_format == "PNG"
    assert Image.open(io.BytesIO(jpeg)).size == (48, 48)
    samples = list(webdataset.WebDataset(str(store.tar(0)), shardshuffle=False))
    assert samples[0]["txt"] == b"fog number 0"
    assert json.loads(samples[0]["json"])["url"].endswith("/png/3")


def test_failures_that_may_pass_are_tried_again_in_a_later_run(pictures: Web, prepare) -> None:
    links = [f"{pictures.url}/flaky/{i}" for i in range(3)] + [f"{pictures.url}/good/9", f"{pictures.url}/status/404"]
    out = prepare(links)
    first = fetch(out, LIMITS)["counts"]
    assert (first["images"], first["may_be_retried"]) == (1, 3)
    second = fetch(out, LIMITS)["counts"]
    assert (second["images"], second["lost_because"]) == (4, {"http-404": 1})
    assert pictures.hits["/good/9"] == pictures.hits["/status/404"] == 1, "what is settled is not asked for again"
    assert pictures.hits["/flaky/0"] == 2
    fetch(out, LIMITS)
    assert sum(pictures.hits.values()) == 8


def test_retries_end(pictures: Web, prepare) -> None:
    out = prepare([f"{pictures.url}/status/500"])
    for _ in range(5):
        section = fetch(out, LIMITS)
    assert pictures.hits["/status/500"] == LIMITS.attempts == 3
    assert section["counts"]["may_be_retried"] == 0


def test_hosts_are_not_pressed(prepare, make_picture) -> None:
    """Three at once get an answer, fewer never: so there are three, and the server sees no fourth."""
    together = asyncio.Barrier(3)

    async def handle(request: web.Request) -> web.StreamResponse:
        await together.wait()
        return web.Response(body=make_picture(int(request.path[1:])))

    server = Web(handle)
    out = prepare([f"{server.url}/{i}" for i in range(12)])
    fetch(out, FetchLimits(concurrency=64, per_host=3, total_seconds=PATIENCE, allow_private=True))
    server.close()
    assert server.most_open == 3
    assert set(statuses(out).values()) == {"ok"}


def test_places_are_given_out_up_to_both_limits_and_no_further() -> None:
    """Without a network: when nothing more can start, exactly as many are under way as may be."""
    rows = [Wanted(i, "target", f"http://host{i % 3}.test/{i}", "text") for i in range(30)]
    active: Counter[str] = Counter()
    seen: list[Counter[str]] = []
    finished: list[int] = []

    async def work(row: Wanted) -> None:
        active[host_of(row.url)] += 1
        for _ in range(5):
            await asyncio.sleep(0)  # whoever may start does so meanwhile
            seen.append(Counter(active))
        active[host_of(row.url)] -= 1
        finished.append(row.index)

    asyncio.run(ByHost(iter(rows), work, concurrency=5, per_host=2).run())
    assert sorted(finished) == list(range(30))
    assert max(moment.total() for moment in seen) == 5
    assert max(max(moment.values()) for moment in seen) == 2


def test_the_first_failure_ends_it_all_at_once() -> None:
    """A row that never ends holds up neither the error nor the end."""
    started: list[int] = []
    ended: list[int] = []

    async def work(row: Wanted) -> None:
        started.append(row.index)
        if row.index == 2:
            raise UserError("the disk is full")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(row.index)

    rows = [Wanted(i, "target", f"http://host{i}.test/", "text") for i in range(20)]
    with pytest.raises(UserError, match="the disk is full"):
        asyncio.run(ByHost(iter(rows), work, concurrency=5, per_host=1).run())
    assert len(started) == 5, "nothing is begun after a failure"
    assert sorted([*ended, 2]) == sorted(started), "and what was begun is ended"


def test_one_busy_host_does_not_hold_up_the_others(prepare, make_picture) -> None:
    """Eight links of one host come first, and answer only when the four other hosts have been asked."""
    others_asked = asyncio.Event()
    quick: set[str] = set()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.host.startswith("busy"):
            await others_asked.wait()
        else:
            quick.add(request.host)
            if len(quick) == 4:
                others_asked.set()
        return web.Response(body=make_picture(int(request.path[1:])))

    server = Web(handle)
    slow = [f"http://busy.test:{server.port}/{i}" for i in range(8)]
    out = prepare(slow + [f"http://h{i}.test:{server.port}/{i}" for i in range(8, 12)])
    limits = FetchLimits(concurrency=4, per_host=1, total_seconds=PATIENCE, allow_private=True)
    settled: list[int] = []
    fetch(out, limits, lookup=_only_local, progress=lambda done, total, images: settled.append(done))
    server.close()
    assert sorted(settled) == list(range(1, 13))
    assert len(_arrivals(out)) == 12
    assert set(statuses(out).values()) == {"ok"}


def _arrivals(out: Path):
    store = open_store_to_read(RetrievalFolder(out), LIMITS)
    return [record for shard in range(store.count) for record in store.finished(shard).values()]


def test_negatives_are_ten_times_the_kept(pictures: Web, prepare) -> None:
    out = prepare([f"{pictures.url}/good/{i}" for i in range(2)], [f"{pictures.url}/good/{i}" for i in range(2, 40)])
    counts = fetch(out, LIMITS)["counts"]
    assert (counts["target"], counts["negatives"]) == (2, 20)


def test_same_responses_same_bytes_in_any_order(pictures: Web, prepare, tmp_path: Path) -> None:
    links = [f"{pictures.url}/good/{i}" for i in range(30)]
    a, b = prepare(links, name="a"), prepare(links, name="b")
    fetch(a, LIMITS)
    fetch(b, FetchLimits(concurrency=1, total_seconds=PATIENCE, max_bytes=200_000, allow_private=True))
    assert (a / "fetch" / "shard-00000.tar").read_bytes() == (b / "fetch" / "shard-00000.tar").read_bytes()
    steps = [json.loads((item / "manifest.json").read_text())["steps"]["fetch"] for item in (a, b)]
    assert steps[0]["hashes"] == steps[1]["hashes"]
    assert steps[0]["counts"] == steps[1]["counts"]


def test_killed_and_resumed_nothing_is_lost_and_nothing_asked_twice(prepare, make_picture) -> None:
    gate = Gate(free=20)
    pictures = Web(pictures_handler(make_picture, gate))
    links = [f"{pictures.url}/held/{i}" for i in range(60)]
    out, whole = prepare(links, name="killed"), prepare(links, name="whole")
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from holdfast.data.retrieve.fetch import fetch\n"
        "from holdfast.data.retrieve.download import FetchLimits\n"
        f"fetch(Path(sys.argv[1]), FetchLimits(concurrency=4, per_host=4, total_seconds={PATIENCE}, "
        "allow_private=True))\n"
    )
    process = Forked("-c", script, out)
    journal = out / "fetch" / "shard-00000.journal"
    wait_until(lambda: journal.exists() and len(journal.read_bytes().splitlines()) >= 10, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gate.open()
    before = len(journal.read_bytes().splitlines())
    assert 10 <= before <= 20
    with journal.open("ab") as file:
        file.write(b'{"record": {"key": "0000')  # and a line that was cut short
    limits = FetchLimits(concurrency=32, per_host=32, total_seconds=PATIENCE, allow_private=True)
    section = fetch(out, limits)
    assert section["counts"]["images"] == 60
    assert sum(pictures.hits.values()) <= 60 + 4, "only what was under way at the kill is asked for again"
    pictures.hits.clear()
    assert fetch(whole, limits)["hashes"] == section["hashes"]
    assert (out / "fetch" / "shard-00000.tar").read_bytes() == (whole / "fetch" / "shard-00000.tar").read_bytes()
    assert not journal.exists()
    pictures.close()


def test_many_shards(pictures: Web, prepare, monkeypatch) -> None:
    from holdfast.data.retrieve import fetch as module

    monkeypatch.setattr(module, "SHARD_ROWS", 10)
    out = prepare([f"{pictures.url}/good/{i}" for i in range(35)])
    assert fetch(out, LIMITS)["counts"]["images"] == 35
    assert len(list((out / "fetch").glob("*.tar"))) == 4
    with tarfile.open(out / "fetch" / "shard-00003.tar") as tar:
        assert tar.getnames()[0] == "000000030.jpg"
        assert len(tar.getnames()) == 15


def test_shards_are_the_tar_files_that_the_standard_library_writes(tmp_path: Path) -> None:
    record = Record("000000007", "target", "http://a.test/", "brouillard épais", None, "ok", 1)
    write_tar(tmp_path / "ours.tar", [(record, b"x" * 1000)])
    with tarfile.open(tmp_path / "ours.tar") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    assert list(contents) == ["000000007.jpg", "000000007.txt", "000000007.json"]
    assert contents["000000007.txt"].decode() == "brouillard épais"
    with tarfile.open(tmp_path / "theirs.tar", "w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    ours, theirs = ((tmp_path / f"{who}.tar").read_bytes().rstrip(b"\0") for who in ("ours", "theirs"))
    assert ours == theirs


def test_downloads_of_another_selection_are_not_mixed_in(pictures: Web, prepare) -> None:
    out = prepare([f"{pictures.url}/good/1"])
    fetch(out, LIMITS)
    other = FetchLimits(allow_private=True, image=ImageLimits(longest_side=32))
    with pytest.raises(UserError, match="another selection or other image settings"):
        fetch(out, other)
    assert fetch(out, other, restart=True)["counts"]["images"] == 1


def test_fetch_before_judge_is_explained(write_captions, tmp_path: Path) -> None:
    search(str(write_captions(["fog"])), SearchQuery(Words("fog")), tmp_path / "out", threads=1)
    with pytest.raises(UserError, match="not judged yet"):
        fetch(tmp_path / "out", LIMITS)
    with pytest.raises(UserError, match="no finished search step"):
        fetch(tmp_path / "nowhere", LIMITS)


@pytest.mark.parametrize("layout", ["webdataset", "files"])
def test_img2dataset_output_in_place_of_our_own(prepare, tmp_path: Path, make_picture, layout: str) -> None:
    links = [f"http://pictures.test/{i}.jpg" for i in range(4)]
    out = prepare(links)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    samples = {
        "000000000": {"json": json.dumps({"url": links[0], "status": "success"}).encode(), "jpg": make_picture(0)},
        "000000001": {"json": json.dumps({"url": links[1], "status": "success"}).encode(), "jpg": b"<html>"},
        "000000002": {"json": json.dumps({"url": "http://other.test/"}).encode(), "jpg": make_picture(2)},
        "000000003": {"json": json.dumps({"url": links[3], "status": "failed_to_download"}).encode()},
    }
    if layout == "webdataset":
        with tarfile.open(theirs / "00000.tar", "w") as tar:
            for key, files in samples.items():
                for ending, content in files.items():
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    else:
        (theirs / "00000").mkdir()
        for key, files in samples.items():
            for ending, content in files.items():
                (theirs / "00000" / f"{key}.{ending}").write_bytes(content)
    section = adopt(theirs, out, LIMITS)
    lost = {"img2dataset-failed": 1, "not-an-image": 1, "not-in-img2dataset": 1}
    assert section["counts"]["lost_because"] == lost
    assert section["counts"]["images"] == 1
    assert section["origin"] == "img2dataset"
    (tmp_path / "empty").mkdir()
    again = prepare(links, name="again")
    with pytest.raises(UserError, match="no img2dataset sample"):
        adopt(tmp_path / "empty", again, LIMITS)
