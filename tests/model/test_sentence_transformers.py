"""CLIP models of sentence-transformers: what they encode is what the library encodes, before, after and back again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from holdfast.data.images import evaluation_view
from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.export import export_model
from holdfast.model.folder import load_model, save_model
from holdfast.model.importers import import_model
from holdfast.model.sources import SourceKind, identify, is_direct_source
from tests.model.foreign import save_transformers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
sentence_transformers = pytest.importorskip("sentence_transformers")
TEXTS = ["a photo of a dog", "The weather", "a much longer sentence about the dog of the weather"]
PICTURES = [  # of the size to which pictures are resized: the library's own resizing rounds otherwise than Pillow's
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (36, 49, 3), dtype=np.uint8)) for seed in (0, 1)
]


def save(folder: Path, layout: str, kind: str = "clip") -> Any:
    """A folder as the library writes it (``now``), or as those of clip-ViT-B-32 are laid out (``former``)."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Transformer

    save_transformers(folder.parent / "source", kind)
    if layout == "former":
        shutil.copytree(folder.parent / "source", folder / "0_CLIPModel")
        modules = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "config_sentence_transformers.json").write_text('{"__version__": {"sentence_transformers": "2.0.0"}}')
    else:
        modules = [Transformer(str(folder.parent / "source")), Normalize()]
        sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def encoded(model: Any, inputs: list[Any]) -> torch.Tensor:
    return torch.from_numpy(model.encode(inputs, normalize_embeddings=True))


@pytest.mark.parametrize("layout", ["now", "former"])
@torch.no_grad()
def test_features_are_those_of_the_library_and_go_back(tmp_path: Path, layout: str) -> None:
    source = save(tmp_path / "clip", layout)
    assert is_direct_source(tmp_path / "clip")
    found = import_model(tmp_path / "clip", classes=["dog", "weather", "rest"])
    assert found.source.kind == SourceKind.SENTENCE_TRANSFORMERS
    assert found.source.words == "a sentence-transformers folder of a CLIP model"
    assert found.notes == ()
    save_model(found.classifier, tmp_path / "model")
    towers = load_model(tmp_path / "model").towers
    model = Classifier(towers, ["dog", "weather", "rest"], [[text] for text in TEXTS], 0.05)
    view = towers.preprocess
    pixels = torch.from_numpy(np.stack([evaluation_view(item, view.size, view.interpolation) for item in PICTURES]))
    images = model.image_features(view.normalise(pixels))
    torch.testing.assert_close(images, encoded(source, PICTURES), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.class_features(), encoded(source, TEXTS), rtol=0, atol=1e-5)
    towers.projection.mul_(torch.rand_like(towers.projection))  # stands in for training
    export_model(model, tmp_path / "out")
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    torch.testing.assert_close(encoded(again, PICTURES), images, rtol=0, atol=1e-5)
    torch.testing.assert_close(encoded(again, TEXTS), model.class_features(), rtol=0, atol=1e-5)
    assert functional.cosine_similarity(encoded(again, TEXTS), encoded(source, TEXTS)).max() < 0.9999
    assert {item.name for item in (tmp_path / "clip").iterdir()} - {"README.md", "1_Normalize"} <= {
        item.name for item in (tmp_path / "out").iterdir()
    }


def test_texts_alone_are_told_what_to_do(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 4)
    folder = tmp_path / "texts"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError) as refused:
        import_model(folder)
    assert "encodes texts alone" in refused.value.text()
    assert "needs an image encoder" in refused.value.text()
    (folder / "config.json").write_text('{"model_type": "clip"}')
    found = identify(folder)
    assert found is not None
    assert not found.can_import
    assert "followed by Pooling" in found.words
    for broken in ('[{"type": "a.CLIPModel", "path": "../clip"}]', "{}"):
        (folder / "modules.json").write_text(broken)
        with pytest.raises(UserError, match="describes no modules"):
            import_model(folder)
