"""Models of other libraries: what they compute is what the library computes, before, after and back again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from holdfast.data.images import evaluation_view
from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.export import export_model
from holdfast.model.folder import load_model, read_description, save_model
from holdfast.model.importers import import_model
from holdfast.model.openclip import ARCHITECTURES, load_towers
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.sources import SourceKind, identify
from holdfast.model.towers import Preprocess
from tests.model.foreign import disturb, save_timm, save_torchvision, save_transformers

TEXTS = ["a photo of a dog", "The weather", "a much longer sentence about the dog of the weather of the photo of a dog"]
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 417, 3), dtype=np.uint8))
CLASSES = ["zero", "one", "eight"]


def pixels(size: int, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(5))


def seen(view: Preprocess) -> torch.Tensor:
    """The picture as holdfast shows it to a model: uint8 [1, 3, S, S]."""
    return torch.from_numpy(evaluation_view(PICTURE, view.size, view.interpolation))[None]


def through_a_folder(classifier: Classifier, folder: Path) -> Classifier:
    save_model(classifier, folder)
    return load_model(folder)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.no_grad()
def test_features_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer

    source = save_transformers(tmp_path / "source", kind)
    found = import_model(tmp_path / "source")
    assert found.source.kind == SourceKind.TRANSFORMERS
    towers = through_a_folder(found.classifier, tmp_path / "model").towers
    close(towers.image_features(pixels(32)), source.get_image_features(pixels(32)).pooler_output)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    padding: Any = {"clip": True, "siglip": "max_length"}[kind]
    encoded = tokenizer(TEXTS, padding=padding, truncation=True, max_length=16, return_tensors="pt")
    mask = encoded["attention_mask"] if kind == "clip" else None
    expected = source.get_text_features(encoded["input_ids"], attention_mask=mask).pooler_output
    classifier = Classifier(towers, ["dog", "weather", "rest"], [[text] for text in TEXTS], 0.05)
    close(classifier.class_features(), torch.nn.functional.normalize(expected, dim=-1))
    projected = towers.text_backbone(towers.tokenize(TEXTS)) @ towers.projection
    bias = towers.projection_bias
    close(projected if bias is None else projected + bias, expected)
    view = towers.preprocess
    processor = AutoImageProcessor.from_pretrained(tmp_path / "source", use_fast=False)
    close(view.normalise(seen(view)), processor(PICTURE, return_tensors="pt").pixel_values)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    source = save_transformers(tmp_path / "half", "siglip", dtype=torch.float16)
    found = import_model(tmp_path / "half")
    assert {value.dtype for value in found.classifier.state_dict().values()} == {torch.float32}
    with torch.no_grad():
        expected = source.half().float().get_image_features(pixels(32)).pooler_output
        close(found.classifier.towers.image_features(pixels(32)), expected)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.no_grad()
def test_transformers_reads_what_is_exported(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    save_transformers(tmp_path / "source", kind)
    model = import_model(tmp_path / "source", classes=CLASSES, template="a photo of the {}").classifier
    disturb(model.towers)
    model.begin_round(4, seed=0).U.normal_(std=0.1)
    export_model(model, tmp_path / "out")
    again = AutoModel.from_pretrained(tmp_path / "out").eval()
    matrix = load_file(tmp_path / "out" / "classifier.safetensors")["classifier"]
    features = torch.nn.functional.normalize(again.get_image_features(pixels(32)).pooler_output, dim=-1)
    record = json.loads((tmp_path / "out" / "holdfast.json").read_text())
    torch.testing.assert_close(
        features @ matrix.T / record["class_temperature"], model.logits(pixels(32)), rtol=1e-5, atol=2e-5
    )
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(
        TEXTS, padding="max_length", max_length=16, truncation=True
    )
    assert tokens["input_ids"] == model.towers.tokenize(TEXTS).tolist()
    assert import_model(tmp_path / "out").classifier.towers.spec()["preprocess"] == model.towers.spec()["preprocess"]


@pytest.mark.parametrize(("name", "arguments"), [("test_vit", {"img_size": 32}), ("test_resnet", {})])
@torch.no_grad()
def test_logits_are_those_of_timm_and_go_back(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    import timm

    source = save_timm(tmp_path / "source", CLASSES, name=name, **arguments)
    model = through_a_folder(import_model(tmp_path / "source").classifier, tmp_path / "model")
    assert model.classes == tuple(CLASSES)
    images = pixels(model.preprocess.size)
    close(model.logits(images), source(images))
    view = model.preprocess
    settings = timm.data.resolve_data_config({}, model=source) | {"input_size": (3, view.size, view.size)}
    close(view.normalise(seen(view)), timm.data.create_transform(**settings)(PICTURE)[None])
    # The target comes last in a round's label space; outputs go back to where they were.
    turned = model.with_classes(["eight", "zero", "one"], [["x"]] * 3)
    export_model(turned, tmp_path / "out")
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    close(again(images), source(images))
    assert import_model(tmp_path / "out").classifier.preprocess == view


@pytest.mark.parametrize("prefix", ["", "module."])
@torch.no_grad()
def test_logits_are_those_of_torchvision_and_go_back(tmp_path: Path, prefix: str) -> None:
    import torchvision

    source = save_torchvision(tmp_path / "net.pth", 3, prefix=prefix)
    found = import_model(tmp_path / "net.pth", architecture="torchvision:shufflenet_v2_x0_5", classes=CLASSES)
    model = through_a_folder(found.classifier, tmp_path / "model")
    close(model.logits(pixels(64)), source(pixels(64)))
    view = model.preprocess
    expected = torchvision.models.get_model_weights("shufflenet_v2_x0_5")["DEFAULT"].transforms()(PICTURE)
    close(view.normalise(seen(view)), expected[None])
    assert found.notes == ()
    export_model(model, tmp_path / "out")
    again = torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=3).eval()
    again.load_state_dict(torch.load(tmp_path / "out" / "model.pth", weights_only=True))
    close(again(pixels(64)), source(pixels(64)))


def test_imagenet_classes_have_their_names(tmp_path: Path) -> None:
    save_torchvision(tmp_path / "net.pth", 1000)
    model = import_model(tmp_path / "net.pth", architecture="torchvision:shufflenet_v2_x0_5").classifier
    assert model.classes[0] == "tench"
    assert [name for name in model.classes if name.startswith("crane")] == ["crane bird", "crane"]


@pytest.mark.parametrize("form", ["module.pt", "plain.safetensors", "folder"])
@torch.no_grad()
def test_openclip_checkpoints(tmp_path: Path, form: str) -> None:
    towers = load_towers("tiny", seed=4)
    assert isinstance(towers, OpenClipTowers)
    state, path = {name: value.contiguous() for name, value in towers.open_clip_state().items()}, tmp_path / form
    if form == "module.pt":
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    elif form == "folder":
        path.mkdir()
        save_file(state, path / "open_clip_model.safetensors")
        (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": ARCHITECTURES["tiny"]}))
    else:
        save_file(state, path)
    found = import_model(path, architecture=None if form == "folder" else "tiny").classifier
    model = through_a_folder(found, tmp_path / "model")
    assert torch.equal(model.towers.image_features(pixels(32)), towers.image_features(pixels(32)))
    tokens = towers.tokenize(TEXTS)
    assert torch.equal(model.towers.text_backbone(tokens), towers.text_backbone(tokens))
    assert model.classes == ()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code was run",))


def test_what_cannot_be_imported_is_named(
    tmp_path: Path, tried: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, words: str, **more: Any) -> None:
        tried("bad inputs")
        with pytest.raises(UserError, match=words):
            import_model(path, **more)

    other = tmp_path / "bert"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    refused(other, "of type 'bert'")
    refused(tmp_path / "nothing", "no model that can be imported")
    (other / "config.json").write_text("{")
    refused(other, "not readable as JSON")
    save_torchvision(tmp_path / "net.pth", 3)
    net = "torchvision:shufflenet_v2_x0_5"
    refused(tmp_path / "net.pth", "which architecture")
    refused(tmp_path / "net.pth", "have no names", architecture=net)
    refused(tmp_path / "net.pth", "number of class names", architecture=net, classes=["a", "b"])
    refused(tmp_path / "net.pth", "another architecture", architecture="torchvision:resnet18", classes=CLASSES)
    refused(tmp_path / "net.pth", "no classifier", architecture="torchvision:resnet1", classes=CLASSES)
    refused(tmp_path / "net.pth", "no classifier", architecture="timm:resnet1", classes=CLASSES)
    refused(tmp_path / "net.pth", "does not end in a linear", architecture="torchvision:squeezenet1_0")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "net.pth").read_bytes()[:5000])
    refused(tmp_path / "cut.pth", "cannot be read as weights", architecture=net, classes=CLASSES)
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path / "evil.pth", "cannot be read as weights", architecture=net, classes=CLASSES)
    assert "code was run" not in capsys.readouterr().out
    save_transformers(tmp_path / "clip", "clip")
    weights = load_file(tmp_path / "clip" / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, tmp_path / "clip" / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "clip", "does not hold all weights")
    (tmp_path / "clip" / "model.safetensors").write_bytes(b"\x10")
    refused(tmp_path / "clip", "cannot be read as weights")


def test_a_source_in_place_of_a_model_folder_is_told_what_it_is(tmp_path: Path) -> None:
    save_transformers(tmp_path / "clip", "clip")
    with pytest.raises(UserError, match=r"a transformers CLIP folder(.|\n)*holdfast import"):
        read_description(tmp_path / "clip")
    found = identify(tmp_path / "clip")
    assert found is not None
    assert found.words == "a transformers CLIP folder"
