from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.words import Words
from tests.data.retrieve.web import Web

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not (SHARED / "laion-style-10k.parquet").exists():
        pytest.skip("the real captions are not beside the checkout (../shared/data)")
    return SHARED


def picture(seed: int, side: int = 48, form: str = "JPEG") -> bytes:
    """A picture unlike any other seed's."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    sink = io.BytesIO()
    image.save(sink, form)
    return sink.getvalue()


@pytest.fixture(scope="session")
def make_picture() -> Callable[..., bytes]:
    return picture


@pytest.fixture
def write_captions(tmp_path: Path) -> Callable[..., Path]:
    """Metadata in LAION's layout from a list of captions (or of (url, caption) pairs)."""

    def write(rows: list[str | tuple[str, str]], name: str = "meta.parquet", **columns: list[object]) -> Path:
        pairs = [
            row if isinstance(row, tuple) else (f"http://pictures.test/{i}.jpg", row) for i, row in enumerate(rows)
        ]
        table = {"URL": [url for url, _ in pairs], "TEXT": [text for _, text in pairs], **columns}
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), path)
        return path

    return write


@pytest.fixture
def searched(write_captions, tmp_path: Path) -> Callable[..., Path]:
    """A folder in which these captions were found."""

    def make(captions: list[str], name: str = "out") -> Path:
        search(str(write_captions(captions, f"{name}.parquet")), SearchQuery(Words("fog")), tmp_path / name, threads=1)
        return tmp_path / name

    return make


@pytest.fixture
def serve():
    """Start servers; they end with the test."""
    servers: list[Web] = []

    def start(handler) -> Web:
        servers.append(Web(handler))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
