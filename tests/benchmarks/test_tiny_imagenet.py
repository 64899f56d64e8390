"""The study with hundreds of tasks: how its images are shared out, and what it remembers of a frozen network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import tiny_imagenet
from benchmarks.remembered import Memory, RowPixels, remembered
from benchmarks.scenes_frozen import FrozenTowers
from holdfast.config import SourceConfig
from holdfast.data.assemble import labelled
from holdfast.data.roles import assign, count_roles
from holdfast.data.sources import catalogue
from holdfast.model.efficientnet import EfficientNetLite0
from holdfast.model.towers import Preprocess

ARCHIVE = Path(__file__).resolve().parents[3] / "shared" / "data" / "tiny-imagenet-200-64.zip"


def test_sealed_images_go_by_content_and_not_by_name() -> None:
    contents = [(f"{i}.jpg", bytes([i]) * 9) for i in range(10)]
    shared = tiny_imagenet.share_out(contents, 4)
    assert sorted(shared.values()) == ["sealed"] * 4 + ["test"] * 6
    renamed = tiny_imagenet.share_out([(f"x{name}", content) for name, content in reversed(contents)], 4)
    assert {name.removeprefix("x"): split for name, split in renamed.items()} == shared


@pytest.mark.skipif(not ARCHIVE.exists(), reason="the real pictures are not beside the checkout (../shared/data)")
def test_every_class_has_the_images_that_the_study_speaks_of(tmp_path: Path) -> None:
    wanted = ("labrador_retriever", "golden_retriever", "lemon")
    small = tmp_path / "small.zip"
    with zipfile.ZipFile(ARCHIVE) as whole, zipfile.ZipFile(small, "w") as part:
        for name in whole.namelist():
            if name.split("/")[1:2] and name.split("/")[1] in wanted:
                part.writestr(name, whole.read(name))
    tiny_imagenet.unpack(small, tmp_path / tiny_imagenet.PICTURES)
    main = catalogue([tiny_imagenet.source(tmp_path)], Path(), limit=0.0)
    counts = count_roles(assign(main, wanted, tiny_imagenet.ROLES))
    expected = {"base": 30, "dev": 20, "constraint": 50, "sealed": 25, "test": 25}
    assert counts == dict.fromkeys(wanted, expected)


def test_a_remembered_network_says_what_it_said(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for i in range(2):
            picture = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / label / f"{i}.png")
    sources = [SourceConfig(kind="folder", path=tmp_path)]
    towers = Pretender().requires_grad_(False)
    memory = Memory(tmp_path / "memory.npz")
    memory.encode(catalogue(sources, Path(), limit=0.0), towers)  # type: ignore[arg-type]

    def answers() -> torch.Tensor:
        examples = labelled(sources, ("a", "b"), size=32, interpolation="bicubic", root=Path())
        with torch.no_grad():
            return towers.image(towers.preprocess.normalise(examples.images()))

    with remembered(Memory(tmp_path / "memory.npz")):
        told = answers()
    torch.testing.assert_close(told, answers(), rtol=1e-3, atol=1e-4)


class Pretender(torch.nn.Module):
    """An untrained image network with the evaluation view that goes with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = EfficientNetLite0().eval()
        self.preprocess = Preprocess(32, (127 / 255,) * 3, (128 / 255,) * 3)


def test_towers_of_tables_find_every_row() -> None:
    features = torch.randn(70_000, 256)
    towers = FrozenTowers(["a"], torch.zeros(1, 384), torch.zeros(384, 256), features)
    rows = np.array([0, 1, 255, 256, 65_535, 65_536, 69_999])
    pixels = towers.preprocess.normalise(RowPixels(70_000).read(rows))
    assert torch.equal(towers.image_features(pixels), features[rows])
    assert not list(towers.parameters())
