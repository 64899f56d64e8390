"""An image tower and the text tower of a second folder: features are sentence-transformers' own, both ways."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from holdfast.cli import main
from holdfast.config import ModelConfig
from holdfast.data.images import evaluation_view
from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.export import export_model
from holdfast.model.folder import load_model, model_fingerprint, save_model
from holdfast.model.importers import import_model
from holdfast.model.interpolate import interpolate
from holdfast.model.pair_towers import PairTowers
from holdfast.model.weights import check_model
from holdfast.rounds.prepare import load_start
from tests.model.foreign import save_text_tower, save_timm, save_transformers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
sentence_transformers = pytest.importorskip("sentence_transformers")
GERMAN = ["ein Foto von einem Hund", "ein Foto vom Wetter", "ein Foto der Acht"]
TEXTS = [*GERMAN, "a photo of a dog", "the Wetter " * 30]  # the last is longer than the tower reads
PICTURES = [  # of the size to which pictures are resized: the library's own resizing rounds otherwise than Pillow's
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (36, 49, 3), dtype=np.uint8)) for seed in (0, 1)
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as that of clip-ViT-B-32 is laid out."""
    folder = tmp_path_factory.mktemp("clip")
    save_transformers(folder / "0_CLIPModel", "clip")
    modules = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text tower as the library writes it, with the modules of clip-ViT-B-32-multilingual-v1."""
    return save_text_tower(tmp_path_factory.mktemp("german") / "text")


def encoded(folder: Path, inputs: list[Any]) -> torch.Tensor:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    return torch.from_numpy(model.encode(inputs, normalize_embeddings=True))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def image_features(model: Classifier) -> torch.Tensor:
    view = model.preprocess
    pixels = torch.from_numpy(np.stack([evaluation_view(item, view.size, view.interpolation) for item in PICTURES]))
    return model.image_features(view.normalise(pixels))


def over_texts(model: Classifier) -> Classifier:
    return Classifier(model.towers, [str(place) for place in range(len(TEXTS))], [[text] for text in TEXTS], 0.05)


TOWERS: dict[str, dict[str, Any]] = {
    "distilbert": {},
    "with bias": {"bias": True},
    "bert, cls": {"family": "bert", "pooling": "cls"},
    "xlm-roberta, max": {"family": "xlm-roberta", "pooling": "max", "max_length": None},
    "mpnet": {"family": "mpnet"},
    "lower case": {"lower_case": True},
}


@pytest.mark.parametrize("settings", TOWERS.values(), ids=TOWERS)
@torch.no_grad()
def test_features_are_those_of_the_library_and_go_back(clip: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    text = save_text_tower(tmp_path / "text", **settings)
    found = import_model(clip, text=text)
    save_model(found.classifier, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert model_fingerprint(loaded) == model_fingerprint(tmp_path / "model")
    model = over_texts(loaded)
    close(image_features(model), encoded(clip, PICTURES))
    close(model.class_features(), encoded(text, TEXTS))
    for parameter in (*model.towers.image_parameters(), *model.towers.text_parameters()):  # stands in for training
        parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    export_model(model, tmp_path / "out")
    close(encoded(tmp_path / "out" / "image", PICTURES), image_features(model))
    close(encoded(tmp_path / "out" / "text", TEXTS), model.class_features())
    assert (encoded(tmp_path / "out" / "text", TEXTS) - encoded(text, TEXTS)).abs().max() > 1e-3
    again = import_model(tmp_path / "out" / "image", text=tmp_path / "out" / "text").classifier
    close(over_texts(again).class_features(), model.class_features())
    assert {item.name for item in text.iterdir()} - {"README.md"} <= {
        item.name for item in (tmp_path / "out" / "text").iterdir()
    }


def test_the_former_layout_of_the_folder(clip: Path, german: Path, tmp_path: Path) -> None:
    """As clip-ViT-B-32-multilingual-v1 has it: weights of Dense in a torch file, a switch for each pooling."""
    former = tmp_path / "former"
    shutil.copytree(german, former)
    (former / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 32, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'
    )
    torch.save(load_file(former / "2_Dense" / "model.safetensors"), former / "2_Dense" / "pytorch_model.bin")
    (former / "2_Dense" / "model.safetensors").unlink()
    expected = over_texts(import_model(clip, text=german).classifier).class_features()
    close(over_texts(import_model(clip, text=former).classifier).class_features(), expected)
    close(encoded(former, TEXTS), expected)


@torch.no_grad()
def test_classes_in_another_language(clip: Path, german: Path) -> None:
    """Names that the model's own tower has no words for are told apart by the text tower of the second folder."""
    names, template = ["Hund", "Wetter", "Acht"], "ein Foto von {}"
    model = import_model(clip, text=german, classes=names, template=template).classifier
    close(model.class_features(), encoded(german, [template.replace("{}", name) for name in names]))
    own = import_model(clip, classes=names, template=template).classifier
    assert (own.class_features()[0] - own.class_features()[1]).abs().max() < 1e-6
    assert (model.class_features()[0] - model.class_features()[1]).abs().max() > 1e-3


def test_what_is_trained_is_what_is_used(clip: Path, german: Path) -> None:
    """The tower that came with the image tower is frozen; everything else takes part in a feature."""
    model = over_texts(import_model(clip, text=german).classifier)
    towers = model.towers
    assert isinstance(towers, PairTowers)
    (model.class_features().sum() + image_features(model).sum()).backward()
    used = {id(item) for item in (*towers.image_parameters(), *towers.text_parameters())}
    for name, parameter in towers.named_parameters():
        assert parameter.requires_grad == (id(parameter) in used), name
        # CLIP's image tower itself has a layer that its pooled feature passes by.
        assert (parameter.grad is not None) == parameter.requires_grad, name
    half = interpolate(model, model.copy(), 0.5)
    close(half.class_features(), model.class_features())


def test_the_command_and_the_section(
    clip: Path, german: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", "import", str(clip), str(tmp_path / "model"), "--text", str(german)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert "with the text tower" in capsys.readouterr().out
    section = ModelConfig(start=Path(clip.name), text=german)
    check_model(section, clip.parent)
    start = load_start(section, clip.parent, 0)
    assert start.towers.spec() == load_model(tmp_path / "model").towers.spec()
    with pytest.raises(ValueError, match="give start too"):
        ModelConfig(architecture="tiny", text=german)
    with pytest.raises(UserError, match="cannot take the text tower"):
        check_model(ModelConfig(start=Path("model"), text=german), tmp_path)
    with pytest.raises(UserError, match="is no text tower"):
        check_model(ModelConfig(start=clip, text=Path("nowhere")), tmp_path)


def edit(path: Path, **values: Any) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **values}))


def without(place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        del modules[place]
        (folder / "modules.json").write_text(json.dumps(modules))

    return change


def half_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.layer.1.output_layer_norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def dense_of(width: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file({"linear.weight": torch.zeros(24, width)}, folder / "2_Dense" / "model.safetensors")

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no transformer": (without(0), "lacks the module Transformer"),
    "no pooling": (without(1), "lacks the module Pooling"),
    "no dense": (without(2), "lacks the module Dense"),
    "other order": (
        lambda folder: (folder / "modules.json").write_text(
            json.dumps(list(reversed(json.loads((folder / "modules.json").read_text()))))
        ),
        "modules that holdfast does not read",
    ),
    "no modules": (lambda folder: (folder / "modules.json").unlink(), "is no text tower"),
    "modules of nothing": (lambda folder: (folder / "modules.json").write_text("[]"), "describes no modules"),
    "unknown pooling": (
        lambda folder: edit(folder / "1_Pooling" / "config.json", pooling_mode="meen"),
        r"does not know(.|\n)*did you mean 'mean'",
    ),
    "two poolings": (
        lambda folder: edit(folder / "1_Pooling" / "config.json", pooling_mode=["mean", "max"]),
        r"does not know(.|\n)*mean and max",
    ),
    "pooling without settings": (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "is missing"),
    "pooling of a list": (lambda folder: (folder / "1_Pooling" / "config.json").write_text("[]"), "holds no table"),
    "activation": (
        lambda folder: edit(folder / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Tanh"),
        r"more than a linear map(.|\n)*Tanh",
    ),
    "residual": (
        lambda folder: edit(folder / "2_Dense" / "config.json", use_residual=True),
        r"more than a linear map(.|\n)*residual",
    ),
    "width of the images": (
        lambda folder: edit(folder / "2_Dense" / "config.json", out_features=25),
        r"differ in width(.|\n)*24 numbers(.|\n)*25",
    ),
    "width of no number": (
        lambda folder: edit(folder / "2_Dense" / "config.json", out_features="24"),
        "describes no Dense module",
    ),
    "width of the encoder": (dense_of(31), r"does not fit its text encoder(.|\n)*24 x 32(.|\n)*24 x 31"),
    "dense without weights": (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "holds no weights"),
    "dense with others": (
        lambda folder: save_file({"weight": torch.zeros(24, 32)}, folder / "2_Dense" / "model.safetensors"),
        "no weights of a Dense module",
    ),
    "encoder": (lambda folder: edit(folder / "config.json", model_type="gpt2"), r"does not read(.|\n)*'gpt2'"),
    "weights cut": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10"), "cannot be read as weights"),
    "half the weights": (half_weights, "does not hold all weights"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer could not be loaded"),
    "padding": (
        lambda folder: edit(folder / "tokenizer_config.json", pad_token="<end>"),
        "no padding of its own",
    ),
    "prompt": (
        lambda folder: edit(folder / "config_sentence_transformers.json", default_prompt_name="query"),
        "before every text",
    ),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_text_folder_that_is_none_gets_a_sentence(
    clip: Path,
    german: Path,
    tmp_path: Path,
    tried: Callable[..., None],
    change: Callable[[Path], Any],
    words: str,
) -> None:
    tried("bad inputs")
    shutil.copytree(german, tmp_path / "text")
    change(tmp_path / "text")
    with pytest.raises(UserError, match=words):
        import_model(clip, text=tmp_path / "text")


def test_other_folders_in_either_place(clip: Path, german: Path, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 5)
    with pytest.raises(UserError, match=r"is no text tower(.|\n)*encodes images too"):
        import_model(clip, text=clip)
    save_timm(tmp_path / "timm", ["a", "b"])
    with pytest.raises(UserError, match=r"is no text tower(.|\n)*a timm folder"):
        import_model(clip, text=tmp_path / "timm")
    with pytest.raises(UserError, match=r"cannot take the text tower(.|\n)*a timm folder"):
        import_model(tmp_path / "timm", text=german)
    with pytest.raises(UserError, match=r"cannot take the text tower(.|\n)*texts alone"):
        import_model(german, text=german)
    with pytest.raises(UserError, match=r"texts alone(.|\n)*--text"):
        import_model(german)
