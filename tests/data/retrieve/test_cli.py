from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from typer.testing import CliRunner

from holdfast.cli.retrieve import retrieve_app
from holdfast.data.retrieve.metadata import S3Options
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.words import Words
from tests.data.retrieve.web import Web, caption_of, chat, pictures_handler, token_of
from tests.processes import python


@pytest.fixture
def pictures(make_picture):
    server = Web(pictures_handler(make_picture))
    yield server
    server.close()


@pytest.fixture
def judge_server():
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        verdict = "no" if "machine" in caption_of(body) else "yes"
        return chat(json.dumps({"token": token_of(body), "reason": "r", "verdict": verdict}))

    server = Web(handle)
    yield server
    server.close()


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(retrieve_app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_end_to_end_in_one_command(pictures: Web, judge_server: Web, write_captions, tmp_path: Path) -> None:
    kinds = ["good/1", "good/2", "redirect/3", "html", "optout/4", "status/404", "good/99"]
    rows = [(f"{pictures.url}/{kind}", f"fog over {kind}") for kind in kinds[:-1]]
    rows += [(f"{pictures.url}/good/99", "fog machine for sale")]
    rows += [(f"{pictures.url}/good/{i}", f"a sunny day {i}") for i in range(100, 130)]
    source = write_captions(rows)
    out = tmp_path / "out"
    words = (
        "all",
        source,
        "--about",
        "fog",
        "--out",
        out,
        "--allow-private",
        "--json",
        "--longest-side",
        64,
        "--timeout",
        300,
    )
    judged = ("--judge-url", judge_server.url + "/v1", "--judge-model", "stub")
    code, text = run(*words, *judged)
    assert code == 0
    counts = json.loads(text)
    assert (counts["search"]["found"], counts["search"]["negatives"]) == (7, 30)
    assert (counts["judge"]["kept"], counts["judge"]["dropped"]) == (6, 1)
    assert (counts["fetch"]["target"], counts["fetch"]["negatives"]) == (3, 30)
    assert counts["fetch"]["lost_because"] == {"http-404": 1, "not-an-image": 1, "opted-out": 1}
    assert (counts["clean"]["target"], counts["clean"]["negatives"]) == (3, 30)
    assert "/good/99" not in pictures.hits, "what the judge dropped is not fetched"
    assert len((out / "clean" / "target.csv").read_text().splitlines()) == 4
    manifest = (out / "manifest.json").read_bytes()
    asked = sum(judge_server.hits.values())
    fetched = sum(pictures.hits.values())
    assert run(*words, *judged)[0] == 0
    assert (out / "manifest.json").read_bytes() == manifest
    assert sum(judge_server.hits.values()) == asked
    assert sum(pictures.hits.values()) == fetched


def test_the_four_steps_one_by_one(pictures: Web, write_captions, tmp_path: Path) -> None:
    source = write_captions([(f"{pictures.url}/good/{i}", f"{'fog' if i < 2 else 'sun'} {i}") for i in range(9)])
    out = tmp_path / "out"
    code, text = run("search", source, "--about", "fog", "--out", out, "--json")
    assert code == 0
    assert {"found": 2, "negatives": 7}.items() <= json.loads(text).items()
    assert json.loads(run("judge", out, "--encoder", "none", "--json")[1])["kept"] == 2
    assert json.loads(run("fetch", out, "--allow-private", "--timeout", 300, "--json")[1])["images"] == 9
    assert json.loads(run("clean", out, "--json")[1])["target"] == 2
    assert "next: holdfast retrieve judge" in run("search", source, "--about", "sun", "--out", tmp_path / "b")[1]


def test_mistakes_end_in_a_sentence_and_code_2(write_captions, tmp_path: Path) -> None:
    source = write_captions(["fog"])
    cases = {
        ("search", tmp_path / "none.parquet", "--about", "x", "--out", tmp_path / "o"): "no Parquet file",
        ("search", source, "--about", "!!", "--out", tmp_path / "o"): "letter or digit",
        ("judge", tmp_path / "nowhere"): "no finished search step",
        ("fetch", tmp_path / "nowhere"): "no finished search step",
        ("clean", tmp_path / "nowhere"): "no finished fetch step",
    }
    for words, sentence in cases.items():
        done = python("-m", "holdfast", "retrieve", *words)
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


def test_a_model_s_own_text_tower_can_judge(monkeypatch) -> None:
    """The callable that the command line hands to the judge is the model's text tower."""
    import torch

    from holdfast.cli import retrieve
    from holdfast.model import folder

    class Towers:
        def tokenize(self, texts: list[str]) -> torch.Tensor:
            return torch.tensor([[len(text), text.count("o")] for text in texts])

    class Model:
        towers = Towers()

        def text_features(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens.to(torch.bfloat16)

    monkeypatch.setattr(folder, "is_model_folder", lambda path: True)
    monkeypatch.setattr(folder, "load_model", lambda path: Model())
    monkeypatch.setattr(folder, "model_fingerprint", lambda path: "sha256:abc")
    embed, name = retrieve.text_encoder("somewhere")
    assert name == "sha256:abc"
    np.testing.assert_array_equal(embed(["fog", "foo"]), [[3, 1], [3, 2]])


@pytest.fixture
def bucket(tmp_path: Path):
    """The part of S3 that reading needs: list, head, get with a range."""
    root = tmp_path / "store"

    async def handle(request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        if "list-type" in request.query or path == "bucket":
            prefix = request.query.get("prefix", "")
            names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
            items = "".join(
                f"<Contents><Key>{name}</Key><Size>{(root / name).stat().st_size}</Size>"
                "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                for name in names
                if name.startswith(prefix)
            )
            text = f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
            return web.Response(text=text, content_type="application/xml")
        file = root / path.removeprefix("bucket/")
        if not file.is_file():
            return web.Response(status=404)
        content = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        headers = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "ETag": '"x"', "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        if asked:
            start, end = int(asked[1]), min(int(asked[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return web.Response(status=206, body=content[start : end + 1], headers=headers)
        return web.Response(body=content, headers=headers)

    server = Web(handle)
    yield server, root
    server.close()


def test_captions_in_an_s3_compatible_store(bucket, tmp_path: Path, monkeypatch) -> None:
    server, root = bucket
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (root / "laion").mkdir(parents=True)
    for part in range(3):
        rows = {
            "URL": [f"http://a.test/{part}{i}" for i in range(40)],
            "TEXT": [f"fog {part}", *[f"sun {part} {i}" for i in range(39)]],
        }
        pq.write_table(pa.table(rows), root / "laion" / f"{part}.parquet")
    query = SearchQuery(Words("fog"))
    local = search(str(root / "laion"), query, tmp_path / "local", threads=1)
    for address in ("s3://bucket/laion", "s3://bucket/laion/*.parquet"):
        out = tmp_path / f"s3-{address.count('*')}"
        remote = search(address, query, out, s3=S3Options(server.url), threads=1)
        assert remote == local
        assert (out / "manifest.json").read_bytes() == (tmp_path / "local" / "manifest.json").read_bytes()
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "test"
