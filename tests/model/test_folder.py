from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from holdfast.errors import FaultError, UserError
from holdfast.model import folder as module
from holdfast.model.classifier import Classifier
from holdfast.model.folder import (
    export_openclip,
    load_model,
    model_fingerprint,
    new_folder,
    read_description,
    save_model,
    start_model,
)
from holdfast.model.openclip import build_towers
from tests.malformed import malformed, refusals

Disturb = Callable[[nn.Module, float], None]


@pytest.fixture
def developed(classifier: Classifier, disturb: Disturb) -> Classifier:
    for seed in (1, 2):
        classifier.begin_round(rank=3, seed=seed)
        disturb(classifier, 0.1)
    classifier.heads.rounds[1].scale.fill_(0.5)
    return classifier


def test_loads_back_to_identical_logits(developed: Classifier, images: Tensor, tmp_path: Path) -> None:
    fingerprint = save_model(developed, tmp_path / "model", parent="sha256:before", extra={"round": 2})
    again = load_model(tmp_path / "model")
    assert torch.equal(again.logits(images), developed.logits(images))
    assert (again.classes, again.prompts) == (developed.classes, developed.prompts)
    assert (
        fingerprint == model_fingerprint(developed) == model_fingerprint(again) == model_fingerprint(tmp_path / "model")
    )
    record = read_description(tmp_path / "model")
    assert (record["parent"], record["extra"], record["fingerprint"]) == ("sha256:before", {"round": 2}, fingerprint)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_what_loads_can_be_developed(developed: Classifier, images: Tensor, tmp_path: Path) -> None:
    save_model(developed, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert not any(parameter.requires_grad for parameter in again.heads.parameters())
    assert all(parameter.requires_grad for parameter in again.towers.image_parameters())
    assert again.towers.projection.requires_grad
    again.towers.freeze(text=True)
    assert not again.towers.projection.requires_grad
    again.begin_round(rank=2, seed=7)
    assert torch.equal(again.logits(images), developed.logits(images))


def test_linear_heads_and_double_precision_come_back(classifier: Classifier, images: Tensor, tmp_path: Path) -> None:
    classifier.use_linear()
    classifier.double()
    save_model(classifier, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert torch.equal(again.logits(images.double()), classifier.logits(images.double()))


def test_fingerprint_sees_everything_that_counts(developed: Classifier) -> None:
    seen = {model_fingerprint(developed)}
    developed.heads.rounds[0].scale.fill_(0.75)
    seen.add(model_fingerprint(developed))
    with torch.no_grad():
        developed.towers.projection[0, 0] += 1e-6
    seen.add(model_fingerprint(developed))
    developed.class_temperature = 0.06
    seen.add(model_fingerprint(developed))
    seen.add(model_fingerprint(developed.with_classes(("clear", "foggy"), (("clear",), ("foggy",)))))
    assert len(seen) == 5


@pytest.mark.parametrize("keep", [0, 10, 100_000])
def test_a_truncated_file(classifier: Classifier, tmp_path: Path, keep: int) -> None:
    save_model(classifier, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(UserError, match="truncated"):
        load_model(tmp_path / "model")
    weights.unlink()
    with pytest.raises(UserError, match="missing"):
        load_model(tmp_path / "model")


def test_a_changed_file_is_a_fault(classifier: Classifier, tmp_path: Path) -> None:
    save_model(classifier, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(FaultError, match="was changed"):
        load_model(tmp_path / "model")


def test_a_changed_description_is_a_fault(classifier: Classifier, tmp_path: Path) -> None:
    save_model(classifier, tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    record = json.loads(path.read_text())
    record["classes"] = record["classes"][::-1]
    path.write_text(json.dumps(record))
    with pytest.raises(FaultError, match="was changed"):
        model_fingerprint(tmp_path / "model")


def test_saving_again(classifier: Classifier, tmp_path: Path, disturb: Disturb) -> None:
    first = save_model(classifier, tmp_path / "model")
    assert save_model(classifier, tmp_path / "model") == first
    disturb(classifier, 0.1)
    with pytest.raises(UserError, match="exists already"):
        save_model(classifier, tmp_path / "model")
    assert model_fingerprint(tmp_path / "model") == first


def test_a_failed_write_leaves_nothing(classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(UserError, match="No space left"):
        save_model(classifier, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(classifier: Classifier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_model(classifier, tmp_path / "file" / "model")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(UserError, match="cannot write"):
            save_model(classifier, tmp_path / "model")


def test_new_folder_is_all_or_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "x") as temporary:
            (temporary / "a").write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_not_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a model folder"):
        load_model(tmp_path)


def test_starting_from_a_folder_or_from_nothing(developed: Classifier, images: Tensor, tmp_path: Path) -> None:
    save_model(developed, tmp_path / "model")
    again = start_model("ignored", tmp_path / "model", developed.classes, developed.prompts, 0.05)
    assert torch.equal(again.logits(images), developed.logits(images))
    fresh = start_model("tiny", None, ("a", "b"), (("a",), ("b",)), 0.05, seed=1)
    assert fresh.logits(images).shape == (5, 2)


def test_export_reproduces_the_logits_without_holdfast(developed: Classifier, images: Tensor, tmp_path: Path) -> None:
    export_openclip(developed, tmp_path / "out")
    expected = developed.logits(images)

    # From here on nothing but OpenCLIP and the files.
    model = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    matrix = load_file(tmp_path / "out" / "classifier.safetensors")["classifier"]
    notes = json.loads((tmp_path / "out" / "holdfast.json").read_text())
    with torch.no_grad():
        logits = model.encode_image(images, normalize=True) @ matrix.T / notes["class_temperature"]
    # OpenCLIP's attention sums in another order than ours: equal up to rounding (2e-6 seen).
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert notes["classes"] == list(developed.classes)
    view = open_clip.get_model_preprocess_cfg(model)
    assert (view["size"], tuple(view["mean"])) == ((32, 32), developed.preprocess.mean)


def test_export_needs_open_clip_towers(classifier: Classifier, tmp_path: Path) -> None:
    classifier.towers = nn.Identity()  # pyright: ignore
    with pytest.raises(UserError, match="only OpenCLIP"):
        export_openclip(classifier, tmp_path / "out")


def refingerprinted(record: dict[str, object], weights: dict[str, Tensor]) -> dict[str, object]:
    """The description with a fingerprint that fits: whoever changed it knew how it is made."""
    described = {name: record.get(name) for name in module._DESCRIBED}
    return {**record, "fingerprint": module._fingerprint(described, weights, {})}


def test_descriptions_of_odd_shapes_are_one_sentence(
    developed: Classifier, tmp_path: Path, images: Tensor, tried: Callable[..., None]
) -> None:
    save_model(developed, tmp_path / "model", extra={"template": ["a {}"], "names": {"clear": "sunny"}})
    path = tmp_path / "model" / "model.json"
    record, weights = json.loads(path.read_text()), load_file(tmp_path / "model" / "model.safetensors")
    towers = record.pop("towers")

    def use(wrong: object) -> None:
        whole = {**wrong, "towers": towers} if isinstance(wrong, dict) else wrong
        with suppress(AttributeError, TypeError, ValueError):  # not even a fingerprint can be made of it
            whole = refingerprinted(whole, weights)
        path.write_text(json.dumps(whole))
        load_model(tmp_path / "model").logits(images)

    assert refusals(use, malformed(record, 150), tried) > 100


@pytest.mark.parametrize(
    "name", ["classes", "prompts", "class_temperature", "linear", "heads", "towers", "weights_bytes"]
)
def test_a_description_without_a_key_names_it(
    name: str, classifier: Classifier, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    save_model(classifier, tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    path.write_text(json.dumps({key: item for key, item in json.loads(path.read_text()).items() if key != name}))
    for read in (read_description, load_model, model_fingerprint):
        with pytest.raises(UserError, match=f"the key '{name}' is missing"):
            read(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": "clear"}, "classes"),
        ({"classes": ["clear", 3]}, "classes.1"),
        ({"class_temperature": None}, "class_temperature"),
        ({"heads": [{"classes": ["clear"], "rank": 10**9}]}, "the heads of round 1"),
        ({"heads": [{"classes": ["clear"], "rank": "3"}]}, "heads.0.rank"),
        ({"assets": ["../../secret"]}, "outside the model folder"),
        ({"assets": ["pipe"]}, "a named pipe"),
        ({"towers": {"kind": "openclip"}}, "cannot be built"),
        ({"towers": {"kind": []}}, "unknown kind of towers"),
        ({"extra": {"template": []}}, "extra.template"),
    ],
    ids=str,
)
def test_what_a_description_says_is_checked_before_it_is_built(
    change: dict[str, object], message: str, developed: Classifier, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    save_model(developed, tmp_path / "model")
    os.mkfifo(tmp_path / "model" / "pipe")
    path = tmp_path / "model" / "model.json"
    weights = load_file(tmp_path / "model" / "model.safetensors")
    path.write_text(json.dumps(refingerprinted({**json.loads(path.read_text()), **change}, weights)))
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "model")
    assert message in caught.value.text()


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0}, {"size": "32"}, {"size": 10**9}, {"mean": [0.5]}, {"std": [0.0, 1.0, 1.0]},
        {"std": [float("nan")] * 3}, {"interpolation": "magic"}, {"interpolation": []}, {"mean": None},
    ],
    ids=str,
)  # fmt: skip
def test_preprocessing_that_makes_no_picture_is_refused(
    change: dict[str, object], classifier: Classifier, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    spec = classifier.towers.spec()
    with pytest.raises(UserError):
        build_towers({**spec, "preprocess": {**spec["preprocess"], **change}})
