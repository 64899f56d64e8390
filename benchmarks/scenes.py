"""Retention on real photographs: Intel scenes, a two-tower model from real pretrained parts, all methods.

    python benchmarks/scenes.py prepare --data DATA --out FOLDER    # once, needs holdfast[parts]; minutes on a CPU
    python benchmarks/scenes.py run FOLDER --out benchmarks/results --workers 14    # settings, main, more
    python benchmarks/scenes.py judge benchmarks/results/scenes-main.json ...    # choices by today's rules, from counts

``prepare`` shares out the roles (base 300, dev 200, sealed 690 images a class, the rest constraint), aligns an
EfficientNet-lite0 with cached MiniLM sentence features on Flickr8k's captions, and packs pictures and texts into one
folder. ``run`` tunes a base model without the target, develops it with every method and writes every single run.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import multiprocessing
import platform
import sys
import time
import traceback
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit
from holdfast.candidates.logit_bias import with_target_bias
from holdfast.candidates.refit import MOST, VIEWS, TargetRefit, refit_from_features, target_direction
from holdfast.candidates.select import Candidate, blocking_task, choose_on_dev, rank_for_testing
from holdfast.certify.exact.score_test import passes
from holdfast.config import CertifyConfig, TrainConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import LabelledSet, PairSet, RoundData, TaskSpec, View
from holdfast.data.transforms import look, random_views
from holdfast.evaluate.metrics import Comparison, TaskChange, choose_checkpoint
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.methods.cross_entropy import CrossEntropyConfig
from holdfast.methods.holdfast import HoldfastConfig
from holdfast.methods.registry import find
from holdfast.model.classifier import Classifier, similarity
from holdfast.model.efficientnet import FEATURES, EfficientNetLite0
from holdfast.model.interpolate import interpolate
from holdfast.model.towers import Preprocess, TwoTowers
from holdfast.runtime import Runtime, derive_seed, generator
from holdfast.train.loop import TrainSpec, train

CLASSES = ("buildings", "forest", "glacier", "mountain", "sea", "street")
WORDS = {
    "buildings": "buildings",
    "forest": "a forest",
    "glacier": "a glacier",
    "mountain": "a mountain",
    "sea": "the sea",
    "street": "a street",
}
TEMPLATES = ("a photo of {}", "a picture that shows {}", "{} on a clear day", "a view of {}", "{} in the distance")
ROLES = {"base": 300, "dev": 200, "sealed": 690}
SIZE, ENLARGE, WIDTH, DIM, HIDDEN = 64, 2, 384, 256, 512
NEGATIVES, ALIGNED = 2500, 4000
FROZEN, MAPS = 5, 40  # blocks below the fourth stage, and channels that come out of them


def prompt(name: str) -> str:
    return TEMPLATES[0].format(WORDS[name])


class Folded(nn.Module):
    """A convolution with its batch norm folded in (the norm's averages stay as they are): one weight, one bias."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, activated: bool) -> None:
        super().__init__()
        scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
        self.weight = nn.Parameter(conv.weight.detach() * scale[:, None, None, None])
        self.bias = nn.Parameter((norm.bias - norm.running_mean * scale).detach())
        self.stride, self.kernel, self.groups = conv.stride[0], conv.kernel_size[0], conv.groups
        self.activated = activated

    def forward(self, values: Tensor) -> Tensor:
        side = values.shape[-1]
        around = max((-(-side // self.stride) - 1) * self.stride + self.kernel - side, 0)
        if around % 2:
            values, around = F.pad(values, (around // 2, around - around // 2) * 2), 0
        values = F.conv2d(values, self.weight, self.bias, self.stride, around // 2, 1, self.groups)
        return F.relu6(values) if self.activated else values


class FoldedBlock(nn.Module):
    """An inverted residual of folded convolutions."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        parts = [Folded(block._depthwise_conv, block._bn1, True), Folded(block._project_conv, block._bn2, False)]
        if block._expand_conv is not None:
            parts.insert(0, Folded(block._expand_conv, block._bn0, True))
        self.parts, self.skips = nn.Sequential(*parts), block._skips

    def forward(self, values: Tensor) -> Tensor:
        narrow = self.parts(values)
        return narrow + values if self.skips else narrow


class TableTexts(TwoTowers):
    """Texts that are rows of a table of sentence features, made beforehand, before the projection W."""

    rows: dict[str, int]
    table: Tensor
    weight: Tensor

    def text_backbone(self, tokens: Tensor) -> Tensor:
        return self.table[tokens[:, 0]].to(self.weight.dtype)

    @property
    def projection(self) -> Tensor:
        return self.weight

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[self.rows[text]] for text in texts])


class PackedTowers(TableTexts):
    """EfficientNet-lite0 with an adapter; texts are rows of a table of sentence features, made beforehand.

    The image tower is trained from its fourth stage on: 3.2 of its 3.4 million weights. What lies below (edges and
    textures at high resolution, most of the arithmetic) stays as it was trained on ImageNet.
    """

    def __init__(self, texts: Sequence[str], table: Tensor) -> None:
        super().__init__()
        mean, std = 127 / 255, 128 / 255
        self.preprocess = Preprocess(SIZE, (mean,) * 3, (std,) * 3)
        self.embed_dim, self.text_width = DIM, WIDTH
        self.rows = {text: row for row, text in enumerate(texts)}
        self._fold(EfficientNetLite0())
        self.adapter = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)
        )
        self.weight = nn.Parameter(torch.randn(WIDTH, DIM) * WIDTH**-0.5)
        self.register_buffer("table", table, persistent=False)
        self.eval()

    def _fold(self, network: Any) -> None:
        blocks = [FoldedBlock(block) for block in network._blocks]
        self.below = nn.Sequential(Folded(network._conv_stem, network._bn0, True), *blocks[:FROZEN])
        self.above = nn.Sequential(*blocks[FROZEN:], Folded(network._conv_head, network._bn1, True))
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def lower(self, images: Tensor) -> Tensor:
        """What the frozen stages say: [n, 3, 64, 64] -> [n, 40, 16, 16]."""
        larger = F.interpolate(images, scale_factor=ENLARGE, mode="bilinear")
        return self.below(larger.contiguous(memory_format=torch.channels_last))

    def upper(self, maps: Tensor) -> Tensor:
        """Features before normalisation: [n, 40, 16, 16] -> [n, D]."""
        return self.adapter(self.above(maps).mean(dim=(2, 3)))

    def image_features(self, images: Tensor) -> Tensor:
        return self.upper(images if images.shape[1] == MAPS else self.lower(images))

    @property
    def image_projection(self) -> Tensor:
        return self.adapter[-1].weight.T

    @property
    def image_projection_bias(self) -> Tensor:
        return self.adapter[-1].bias

    def image_hidden(self, images: Tensor) -> Tensor:
        maps = images if images.shape[1] == MAPS else self.lower(images)
        return self.adapter[:-1](self.above(maps).mean(dim=(2, 3)))

    def spec(self) -> dict[str, Any]:
        return {"kind": "packed"}

    def image_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.above.parameters(), *self.adapter.parameters()]

    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [self.weight]


# -- prepare ----------------------------------------------------------------------------------------------------------


def prepare(data: Path, out: Path) -> None:
    """Roles, pictures, texts and the aligned towers, in one folder of about 55 MB."""
    import tempfile

    from holdfast.config import RolesConfig, SourceConfig
    from holdfast.data.roles import assign
    from holdfast.data.sources import catalogue

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(data / "intel-scene-64.zip") as archive:
            archive.extractall(folder)
        main = catalogue([SourceConfig(kind="folder", path=Path(folder))], Path(), limit=0.0)
        assigned = assign(main, CLASSES, RolesConfig(**ROLES, test=0.0))
        table = assigned.table(main)
        locators = table["locator"].to_pylist()
        contents = [_find(Path(folder), locator).read_bytes() for locator in locators]
    examples = {
        "ids": table["example_id"].to_pylist(),
        "labels": [CLASSES.index(name) for name in table["class"].to_pylist()],
        "roles": table["role"].to_pylist(),
    }
    flickr, captions = _flickr(data / "flickr8k-96.zip")
    prompts = sorted({template.format(WORDS[name]) for template in TEMPLATES for name in CLASSES})
    kept = generator("flickr negatives").permutation(len(flickr))[:NEGATIVES]
    texts = [*prompts, *sorted({captions[i][0] for i in kept})]
    paired = generator("flickr alignment").permutation(len(flickr))[:ALIGNED]
    towers, features = _align([flickr[i] for i in paired], [captions[i] for i in paired], texts)
    negatives = [_shrink(flickr[i]) for i in kept]
    blob = b"".join([*contents, *negatives])
    sizes = [len(one) for one in [*contents, *negatives]]
    np.savez(out / "pictures.npz", blob=np.frombuffer(blob, dtype=np.uint8), sizes=np.array(sizes))
    (out / "examples.json").write_text(
        json.dumps({**examples, "captions": [captions[i][0] for i in kept], "texts": texts})
    )
    state = {name: value.half() if value.is_floating_point() else value for name, value in towers.state_dict().items()}
    torch.save({"towers": state, "table": features.half()}, out / "aligned.pt")
    print(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:.1f} MB")


def _find(folder: Path, locator: str) -> Path:
    path = Path(locator)
    return path if path.is_absolute() else folder / path


def _flickr(path: Path) -> tuple[list[bytes], list[list[str]]]:
    import csv

    with zipfile.ZipFile(path) as archive:
        captions: dict[str, list[str]] = {}
        for row in csv.DictReader(io.StringIO(archive.read("captions.csv").decode())):
            captions.setdefault(row["filepath"], []).append(row["title"].strip())
        names = sorted(name for name in captions if name.startswith(("train/", "val/", "extra/")))
        return [archive.read(name) for name in names], [captions[name] for name in names]


def _shrink(content: bytes) -> bytes:
    image = Image.open(io.BytesIO(content)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=85)
    return packed.getvalue()


def _align(pictures: list[bytes], captions: list[list[str]], texts: list[str]) -> tuple[PackedTowers, Tensor]:
    """Contrastive alignment of adapter and W on cached features of both frozen encoders."""
    from holdfast.model.parts import PartTowers

    torch.manual_seed(0)
    parts = PartTowers.load("parts-128", None, seed=0)
    with torch.no_grad():
        image = torch.cat([parts.image(_pixels(pictures[i : i + 64])) for i in range(0, len(pictures), 64)])
        words = [group[0] for group in captions]
        sentence = torch.cat(
            [parts.text_backbone(parts.tokenize(words[i : i + 256])) for i in range(0, len(words), 256)]
        )
        table = torch.cat([parts.text_backbone(parts.tokenize(texts[i : i + 256])) for i in range(0, len(texts), 256)])
    towers = PackedTowers(texts, table)
    towers._fold(parts.image)
    optimizer = torch.optim.AdamW([*towers.adapter.parameters(), towers.weight], 1e-3, weight_decay=0.05)
    held = len(pictures) - 500
    for step in range(600):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 600)) / 2
        chosen = torch.randint(held, (512,))
        one = F.normalize(towers.adapter(image[chosen]), dim=1)
        two = F.normalize(sentence[chosen] @ towers.weight, dim=1)
        logits = one @ two.T / 0.05
        loss = (F.cross_entropy(logits, torch.arange(512)) + F.cross_entropy(logits.T, torch.arange(512))) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        one, two = (
            F.normalize(towers.adapter(image[held:]), dim=1),
            F.normalize(sentence[held:] @ towers.weight, dim=1),
        )
        recall = (
            ((one @ two.T).argsort(dim=1, descending=True)[:, :10] == torch.arange(500)[:, None]).any(1).float().mean()
        )
    print(f"aligned on {held} pairs: loss {loss.item():.2f}, recall@10 of 500 held-out pairs {float(recall):.2f}")
    return towers, table


def _pixels(contents: list[bytes]) -> Tensor:
    size = SIZE * ENLARGE
    arrays = [
        np.asarray(Image.open(io.BytesIO(one)).convert("RGB").resize((size, size), Image.Resampling.BICUBIC))
        for one in contents
    ]
    return (torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() - 127) / 128


# -- run --------------------------------------------------------------------------------------------------------------


class ArrayPixels:
    """Decoded pictures in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def size(self) -> int:
        return self.array.shape[-1]

    def __len__(self) -> int:
        return len(self.array)

    def read(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.array[rows])


@dataclass(frozen=True)
class Packed:
    """What ``prepare`` wrote, decoded."""

    pixels: ArrayPixels
    ids: list[str]
    labels: np.ndarray
    roles: np.ndarray
    captions: list[str]
    texts: list[str]
    aligned: dict[str, Any]


def load(folder: Path) -> Packed:
    examples = json.loads((folder / "examples.json").read_text())
    archive = np.load(folder / "pictures.npz")
    ends = np.cumsum(archive["sizes"])
    blob = archive["blob"].tobytes()
    pictures = np.empty((len(ends), 3, SIZE, SIZE), dtype=np.uint8)
    for row, (end, size) in enumerate(zip(ends, archive["sizes"], strict=True)):
        pictures[row] = np.asarray(Image.open(io.BytesIO(blob[end - size : end])).convert("RGB")).transpose(2, 0, 1)
    return Packed(
        ArrayPixels(pictures),
        examples["ids"],
        np.array(examples["labels"]),
        np.array(examples["roles"]),
        examples["captions"],
        examples["texts"],
        torch.load(folder / "aligned.pt", weights_only=True),
    )


@dataclass(frozen=True)
class Job:
    """One run: a method with a setting, on a target, with so many constraint images a task, from a seed."""

    name: str
    target: str
    size: int
    seed: int
    method: dict[str, Any]
    train: dict[str, Any]
    heads: bool = True
    negatives: int | None = None  # external pairs; all of them by default
    after: str | None = None  # an earlier round's target: this one starts from that round's result


def _set(packed: Packed, role: str, classes: Sequence[str], keep: np.ndarray | None = None) -> LabelledSet:
    """Examples of a role, labelled by their place in ``classes``."""
    index = {CLASSES.index(name): place for place, name in enumerate(classes)}
    chosen = [p for p in np.flatnonzero(packed.roles == role) if packed.labels[p] in index]
    wanted = None if keep is None else set(keep.tolist())
    rows = np.array(chosen if wanted is None else [p for p in chosen if p in wanted], dtype=np.int64)
    labels = np.array([index[packed.labels[p]] for p in rows], dtype=np.int64)
    return LabelledSet(packed.pixels, rows, labels, tuple(packed.ids[p] for p in rows))


def draw(packed: Packed, name: str, size: int | None, seed: int) -> np.ndarray:
    """``size`` constraint images of a class, by seed."""
    rows = np.flatnonzero((packed.roles == "constraint") & (packed.labels == CLASSES.index(name)))
    return rows if size is None else rows[generator(seed, "constraint", name).permutation(len(rows))[:size]]


def round_data(
    packed: Packed, target: str, size: int | None, seed: int, *, negatives: int | None = None, spare: int = 0
) -> RoundData:
    protected = tuple(name for name in CLASSES if name != target)
    classes = (*protected, target)
    chosen = np.concatenate([draw(packed, name, size, seed) for name in protected])
    own = draw(packed, target, None, seed)
    own = own[: len(own) - spare]  # research leaves some of the target's images to judge by
    sentences = [template.format(WORDS[target]) for template in TEMPLATES]
    texts = tuple(sentences[i % len(sentences)] for i in range(len(own)))
    first = len(packed.ids)
    external = np.arange(first, first + (len(packed.captions) if negatives is None else negatives))
    constraint = _set(packed, "constraint", classes, chosen)
    return RoundData(
        tasks=TaskSpec(target, protected, tuple((prompt(name),) for name in classes)),
        target=PairSet(packed.pixels, own, texts, tuple(packed.ids[p] for p in own)),
        negatives=PairSet(
            packed.pixels,
            external,
            tuple(packed.captions[: len(external)]),
            tuple(f"flickr-{i}" for i in range(len(external))),
        ),
        constraint=constraint,
        dev=_set(packed, "dev", classes),
        open_test=lambda: _set(packed, "test", classes),
        open_sealed=lambda: _set(packed, "sealed", classes),
    )


def towers_of(packed: Packed) -> PackedTowers:
    towers = PackedTowers(packed.texts, packed.aligned["table"].float())
    towers.load_state_dict(
        {
            name: value.float() if value.is_floating_point() else value
            for name, value in packed.aligned["towers"].items()
        }
    )
    return towers


def tune_base(packed: Packed, without: str, device: torch.device, steps: int = 300) -> Classifier:
    """The old model: tuned on base images of the other classes by cross-entropy; it never saw the target(s)."""
    others = tuple(name for name in CLASSES if name not in without.split("+"))
    examples = _set(packed, "base", others)
    last = len(others) - 1
    own, rest = examples.of_class(last), np.flatnonzero(examples.labels != last)

    def part(positions: np.ndarray) -> PairSet:
        texts = tuple(prompt(others[label]) for label in examples.labels[positions])
        return PairSet(packed.pixels, examples.rows[positions], texts, tuple(examples.ids[p] for p in positions))

    data = RoundData(
        tasks=TaskSpec(others[-1], others[:-1], tuple((prompt(name),) for name in others)),
        target=part(own),
        negatives=part(rest),
        constraint=LabelledSet(
            packed.pixels, examples.rows[rest], examples.labels[rest], tuple(examples.ids[p] for p in rest)
        ),
        dev=examples,
        open_test=lambda: examples,
        open_sealed=lambda: examples,
    )
    model = Classifier(towers_of(packed), others, data.tasks.prompts, 0.05).to(device).requires_grad_(True)
    model.towers.below.requires_grad_(False)
    config = TrainConfig(
        steps=steps,
        batch=17,
        target_share=16 / 17,
        images_per_task=16,
        learning_rate=1e-4,
        weight_decay=0.05,
        warmup_steps=20,
        precision="auto",
        log_every=100,
        device=str(device),
        flip=True,
    )
    method = build_method(model, CrossEntropyConfig(heads=False), steps).to(device)
    method.prepare(model, data)
    train(
        method,
        data,
        TrainSpec(config, ViewSettings(True, "paired", (0.7, 1.0), True), 0, "base", steps),
        Runtime(device),
    )
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Judge:
    """A set of examples as the frozen stages see them, with what the old model says of each."""

    examples: LabelledSet
    maps: Tensor
    labels: Tensor
    right: np.ndarray
    chance: np.ndarray


Scores = tuple[np.ndarray, np.ndarray]  # correct (bool) and probability of the right class, for each example


@torch.no_grad()
def scores(model: Classifier, maps: Tensor, labels: Tensor, others: Sequence[Classifier] = ()) -> list[Scores]:
    """Of the model, and of others that share its image tower."""
    features = torch.cat([model.image_features(maps[i : i + 1500]) for i in range(0, len(maps), 1500)])
    found: list[Scores] = []
    for one in (model, *others):
        logits = similarity(features, one.class_matrix()) / one.class_temperature
        chance = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
        found.append(((logits.argmax(1) == labels).cpu().numpy(), chance.cpu().numpy()))
    return found


@torch.no_grad()
def lower_maps(model: Classifier, examples: LabelledSet, device: torch.device) -> Tensor:
    """What the frozen stages say of the evaluation views: computed once, since no run changes it."""
    towers, view = model.towers, model.preprocess
    return torch.cat(
        [
            towers.lower(view.normalise(examples.images(slice(i, i + 500)).to(device)))
            for i in range(0, len(examples), 500)
        ]
    )


TRAIN: dict[str, Any] = {
    "steps": 150,
    "batch": 64,
    "images_per_task": 10,
    "learning_rate": 1e-4,
    "weight_decay": 0.05,
    "warmup_steps": 20,
    "precision": "auto",
    "log_every": 1000,
    "flip": True,
    "speed": "graphs",
}
LOOKS, MARGIN, LEVEL, SPARE = 4, 0.03, 0.05, 300
WALK, HELD = CertifyConfig().walk, CertifyConfig().target_bias


def run(
    packed: Packed, base: Classifier, job: Job, device: torch.device, judges: tuple[str, ...]
) -> tuple[dict[str, Any], Classifier]:
    """Develop once: look on dev images, walk and hold back from the best look, certify, and score test."""
    began = time.perf_counter()
    spare = SPARE if "spare" in judges else 0
    data = round_data(packed, job.target, job.size, job.seed, negatives=job.negatives, spare=spare)
    spec = data.tasks
    old = base.with_classes(spec.classes, spec.prompts, 0.05).frozen_copy()
    model = old.copy()
    for parameter in model.towers.parameters():
        parameter.requires_grad_(True)
    model.towers.below.requires_grad_(False)
    config = TrainConfig(**{**TRAIN, **job.train, "device": str(device)})
    settings = find(job.method["name"]).settings(**job.method)
    method = build_method(model, settings, config.steps)
    if method.linear:
        model.towers.weight.requires_grad_(False)
        model.use_linear()
    elif method.uses_heads and job.heads:
        model.begin_round(32, derive_seed(job.seed, "heads"))
    method.to(device)
    method.prepare(old, data)
    method.to(device)
    sets = {name: _judge(packed, data, old, name, job, device) for name in judges}
    looks: list[tuple[int, Classifier, Comparison, dict[str, Any]]] = []

    def changed(models: Sequence[Classifier], names: Iterable[str]) -> list[dict[str, dict[str, list[float]]]]:
        found = {name: scores(models[0], sets[name].maps, sets[name].labels, models[1:]) for name in names}
        return [
            {name: _changes(sets[name], each[place], spec) for name, each in found.items()}
            for place in range(len(models))
        ]

    def look(done: int, method: Method) -> dict[str, Any]:
        there = method.model.frozen_copy()
        (seen,) = changed([there], ["dev"])
        looks.append((done, there, comparison(seen["dev"], sets["dev"], spec), seen))
        return {}

    views = ViewSettings(True, getattr(settings, "views", "clean"), config.crop_scale, config.flip)
    plan = TrainSpec(config, views, job.seed, "scenes", config.steps // LOOKS)
    ready = time.perf_counter()
    train(method, data, plan, Runtime(device), evaluate=look)
    trained = time.perf_counter()
    best = choose_checkpoint([one[2].dev_safety for one in looks], [one[2].target_gain for one in looks])
    done, end, _, _ = looks[best]
    pictures = fit_pictures(old, data, config, device)

    def fitted(lam: float) -> Classifier:
        there = old if lam == 0 else end if lam == 1 else interpolate(old, end, lam).to(device)
        return fit_on(there, spec.target, *pictures).applied(there)

    walk = [
        {"step": done, "lambda": lam, "held": held, **seen}
        for lam in WALK
        for held, seen in zip(HELD, changed(with_target_bias(fitted(lam), data, HELD), judges), strict=True)
    ]
    candidates = [
        Candidate(f"step-{done}", one["lambda"], comparison(one["dev"], sets["dev"], spec), one["held"]) for one in walk
    ]
    chosen = choose_on_dev(candidates)
    verdict, passed = certified(candidates, walk, spec)
    ships = passed or chosen
    shipped = old if ships is None else with_target_bias(fitted(ships.lam), data, [ships.held])[0]
    result = {
        "name": job.name,
        "target": job.target,
        "size": job.size,
        "seed": job.seed,
        "method": job.method,
        "train": job.train,
        **({"heads": job.heads} if not job.heads else {}),
        **({"negatives": job.negatives} if job.negatives is not None else {}),
        **({"after": job.after} if job.after else {}),
        "classes": list(spec.classes),
        "old": {name: _accuracy(one, spec) for name, one in sets.items()},
        "looks": [{"step": step, **seen} for step, _, _, seen in looks],
        "end": {"step": done, **changed([end], judges)[0]},
        "walk": walk,
        "chosen": None if chosen is None else [chosen.lam, chosen.held],
        **verdict,
        "blocked_by": blocking_task(
            [*((str(one[0]), one[2]) for one in looks), *((one.name, one.dev) for one in candidates)]
        ),
        "seconds": [round(then, 2) for then in (ready - began, trained - ready, time.perf_counter() - trained)],
    }
    return result, shipped


@torch.no_grad()
def fit_pictures(old: Classifier, data: RoundData, config: TrainConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pictures that the target's logit is fitted on, as the frozen stages see them, and their labels: as in
    ``holdfast develop``, but that the frozen stages see each of them once for all λ."""
    towers, view = old.towers, old.preprocess
    sets = (data.constraint, data.constraint.labels), (data.target, np.full(len(data.target), data.tasks.target_index))
    parts, labels = [], []
    for number in range(min(VIEWS, max(1, MOST // sum(len(one) for one, _ in sets)))):
        for which, (one, own) in enumerate(sets):
            seed = derive_seed("target fit", number, which)
            through = random_views(len(one), seed, crop_scale=config.crop_scale, flip=config.flip) if number else None
            for i in range(0, len(one), 250):
                part = slice(i, i + 250)
                chosen = None if through is None else View(through.box[part], through.flip[part])
                parts.append(towers.lower(look(one.images(part).to(device), view.mean, view.std, chosen)))
            labels.append(torch.from_numpy(own))
    return torch.cat(parts), torch.cat(labels).to(device)


@torch.no_grad()
def _upper(towers: Any, maps: Tensor, in_tower: bool) -> tuple[Tensor, Tensor]:
    hidden = towers.image_hidden(maps) if in_tower else towers.image_features(maps)
    return hidden, towers.project(hidden) if in_tower else hidden


def fit_on(model: Classifier, name: str, maps: Tensor, labels: Tensor) -> TargetRefit:
    """The target's logit fitted anew, in the image tower where it has a last layer."""
    direction = target_direction(model, name)
    found = [_upper(model.towers, maps[i : i + 1000], direction is not None) for i in range(0, len(maps), 1000)]
    hidden, features = (torch.cat(parts) for parts in zip(*found, strict=True))
    return refit_from_features(model, name, direction, hidden, features, labels)


def comparison(changes: dict[str, list[float]], judge: Judge, spec: TaskSpec) -> Comparison:
    """Counts as the product's rules take them; losses are not looked at here."""
    tasks = {}
    for k, name in enumerate(spec.classes):
        n, gained, lost = (int(one) for one in changes[name][:3])
        before = int(judge.right[judge.examples.of_class(k)].sum())
        tasks[name] = TaskChange(n, before, before + gained - lost, gained, lost, 0.0, -changes[name][3])
    return Comparison(spec.target, tasks)


def certified(
    candidates: Sequence[Candidate], walk: Sequence[dict[str, Any]], spec: TaskSpec
) -> tuple[dict[str, Any], Candidate | None]:
    """The fixed sequence on the sealed images, as in `holdfast develop`: the last candidate that passes."""
    if "sealed" not in walk[0]:
        return {}, None
    margins = dict.fromkeys(spec.protected, MARGIN)
    order = rank_for_testing(candidates, margins, test_more_candidates=False)
    shipped: Candidate | None = None
    for one in order:
        sealed = next(there["sealed"] for there in walk if (there["lambda"], there["held"]) == (one.lam, one.held))
        counts = {name: [int(value) for value in sealed[name][:3]] for name in spec.classes}
        asked = {**margins, spec.target: 0.0}
        if not all(passes(counts[name][1], counts[name][2], counts[name][0], asked[name], LEVEL) for name in asked):
            break
        shipped = one
    said = None if shipped is None else [shipped.lam, shipped.held]
    return {"certified": said, "order": [[one.lam, one.held] for one in order]}, shipped


def rejudged(run: dict[str, Any]) -> dict[str, Any]:
    """A recorded run with the choice that today's rules make of its counts. Two rounds stay as they were: the second
    began where the first one's choice of then led."""
    if "error" in run or "after" in run or "sealed" not in run["walk"][0]:
        return run
    protected = tuple(name for name in run["classes"] if name != run["target"])
    spec = TaskSpec(run["target"], protected, tuple((prompt(name),) for name in run["classes"]))
    candidates = []
    for one in run["walk"]:
        tasks = {}
        for name, (n, gained, lost, rise, *_) in one["dev"].items():
            before = round(run["old"]["dev"][name] * n)
            tasks[name] = TaskChange(int(n), before, before + gained - lost, gained, lost, 0.0, -rise)
        dev = Comparison(run["target"], {name: tasks[name] for name in run["classes"]})
        candidates.append(Candidate(f"step-{one['step']}", one["lambda"], dev, one["held"]))
    chosen = choose_on_dev(candidates)
    return {
        **run,
        "chosen": None if chosen is None else [chosen.lam, chosen.held],
        **certified(candidates, run["walk"], spec)[0],
    }


def _judge(packed: Packed, data: RoundData, old: Classifier, name: str, job: Job, device: torch.device) -> Judge:
    key = (name, job.target, job.after) if name != "spare" else (name, job.target, job.after, job.size, job.seed)
    cache = _STATE.setdefault("judges_of", {})
    if key not in cache:
        examples = _examples(packed, data, name, job)
        maps = lower_maps(old, examples, device)
        labels = torch.from_numpy(examples.labels).to(device)
        cache[key] = Judge(examples, maps, labels, *scores(old, maps, labels)[0])
    return cache[key]


def _examples(packed: Packed, data: RoundData, name: str, job: Job) -> LabelledSet:
    if name == "dev":
        return data.dev
    if name == "spare":  # constraint images that this run does not train on: a judge for research, never test or sealed
        used = {*data.constraint.rows.tolist(), *data.target.rows.tolist()}
        spare = [draw(packed, one, None, job.seed) for one in data.tasks.classes]
        keep = np.concatenate([np.array([p for p in rows if p not in used][-500:], dtype=np.int64) for rows in spare])
        return _set(packed, "constraint", data.tasks.classes, keep)
    return data.open_test() if name == "test" else data.open_sealed()


def _accuracy(judge: Judge, spec: TaskSpec) -> dict[str, float]:
    return {
        name: round(float(judge.right[judge.examples.of_class(k)].mean()), 4) for k, name in enumerate(spec.classes)
    }


def _changes(judge: Judge, after: Scores, spec: TaskSpec) -> dict[str, list[float]]:
    """Per class: images, gained, lost, and the mean change in the right class's probability."""
    result = {}
    for k, name in enumerate(spec.classes):
        here = judge.examples.of_class(k)
        rise = float((after[1][here] - judge.chance[here]).mean()) if len(here) else 0.0
        gained, lost = (
            int((after[0][here] & ~judge.right[here]).sum()),
            int((~after[0][here] & judge.right[here]).sum()),
        )
        result[name] = [len(here), gained, lost, round(rise, 5)]
    return result


# -- studies ----------------------------------------------------------------------------------------------------------

CHOSEN_ON, CHOSEN_AT = ("forest", "sea"), 300  # targets and size by which settings were chosen
TARGETS, SIZES, SEEDS = ("forest", "sea", "buildings"), (100, 300, 1000), (0, 1, 2, 3, 4)
PUBLISHED: dict[str, Any] = HoldfastConfig.published().model_dump()
DEFAULT: dict[str, Any] = HoldfastConfig().model_dump()
SLOW: dict[str, Any] = {"learning_rate": 5e-5}
OURS = (DEFAULT, {**SLOW, "head_learning_rate": HoldfastConfig().head_lr_multiplier * SLOW["learning_rate"]})
CORE = ("holdfast", "published", "finetune", "rm")  # five seeds; the others as many as below
FEWER = {"gem": 1, "co2l": 2}

# What was chosen among, once, on two targets at one size: two rates, and two weights where a method has one.
SETTINGS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    name: [(one, rate) for one in tried for rate in ({}, SLOW)]
    for name, tried in {
        "finetune": [{"name": "finetune"}],
        "flyp": [{"name": "flyp"}],
        "wccl": [{"name": "wccl", "alpha": alpha} for alpha in (0.9, 0.99)],
        "gem": [{"name": "gem", "gamma": 1.0}],
        "co2l": [{"name": "co2l"}],
        "der": [{"name": "der", "alpha": alpha} for alpha in (1.0, 10.0)],
        "rm": [{"name": "rm", "alpha": alpha} for alpha in (1.0, 10.0)],
        "published": [{**PUBLISHED, "beta": beta} for beta in (200.0, 2000.0)],
    }.items()
}


def studies(name: str, chosen: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> list[Job]:
    """The jobs of a study, in the order in which they are run."""
    if name == "research":
        return [
            Job(key, target, size, seed, method, settings)
            for seed in (0,)
            for size in (1000, 300, 100)
            for target in CHOSEN_ON
            for key, (method, settings) in research_variants().items()
        ]
    if name == "settings":
        return [
            Job(f"{key} {place}", target, CHOSEN_AT, 0, method, settings)
            for key, tried in SETTINGS.items()
            for place, (method, settings) in enumerate(tried)
            for target in CHOSEN_ON
            if len(tried) > 1
        ]
    published, rate = chosen["published"]
    rows = {"holdfast": OURS, **chosen, "mismatched": ({**published, "views": "mismatched"}, rate)}
    if name == "main":
        jobs = [
            Job(key, target, size, seed, method, settings)
            for seed in SEEDS
            for size in SIZES
            for target in TARGETS
            for key, (method, settings) in rows.items()
            if seed < (len(SEEDS) if key in CORE else FEWER.get(key, 3))
            and (key != "finetune" or size == SIZES[0])  # it sees no constraint images: one run serves every size
        ]
        # What matters most comes first, should time run out: the other methods' first seed after three of the core's.
        return sorted(jobs, key=lambda job: job.seed if job.name in CORE else 2.5 + 2 * job.seed)
    if name == "more":
        return more(chosen["published"])
    raise SystemExit(f"no study {name!r}")


def more(published: tuple[dict[str, Any], dict[str, Any]]) -> list[Job]:
    """The target in conflict, two rounds, and the paper's ablations."""
    method, rate = published
    jobs = [Job("conflict", "glacier", 100, seed, *OURS) for seed in SEEDS]
    jobs += [Job("second round", "sea", 300, seed, *OURS, after="forest") for seed in SEEDS]
    for seed in SEEDS[:2]:
        for target in CHOSEN_ON:
            jobs += [Job("holdfast, no heads", target, 100, seed, *OURS, heads=False)]
            jobs += [Job("published, no heads", target, 100, seed, method, rate, heads=False)]
            jobs += [Job("holdfast, 100 external pairs", target, 100, seed, *OURS, negatives=100)]
            jobs += [Job("published, 100 external pairs", target, 100, seed, method, rate, negatives=100)]
            jobs += [Job("published, rising beta", target, 100, seed, {**method, "beta_schedule": "cosine"}, rate)]
    return jobs


def choose_settings(results: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Of each method the setting with the best worst change on dev over both targets, best look; then target gain."""
    chosen = {key: tried[0] for key, tried in SETTINGS.items()}
    for key, tried in SETTINGS.items():
        ranked = []
        for place in range(len(tried)):
            runs = [one for one in results if one["name"] == f"{key} {place}" and "error" not in one]
            if len(runs) < len(CHOSEN_ON):
                continue
            ends = [(end_of(one)["dev"], one["target"]) for one in runs]
            worst = [min((v[1] - v[2]) / v[0] for name, v in dev.items() if name != target) for dev, target in ends]
            gain = [(dev[target][1] - dev[target][2]) / dev[target][0] for dev, target in ends]
            kept = sum(one >= 0 for one in worst)
            ranked.append(((kept, sum(worst) + 0.5 * sum(gain)), place))
        if ranked:
            chosen[key] = tried[max(ranked)[1]]
    return chosen


def end_of(run: dict[str, Any]) -> dict[str, Any]:
    """What training found at the best look; runs of before had no other model at λ = 1."""
    return run.get("end") or next(one for one in run["walk"] if one["lambda"] == 1 and not one["held"])


def research_variants() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """List six: views of constraint images, quicker towers, less distillation.

    The five lists before it are on record (results/scenes-research*.json hold each run's settings).
    """
    paired, clean = ({**DEFAULT, "views": views} for views in ("paired", "clean"))
    rate, quick = OURS[1], {"learning_rate": 1e-4, "head_learning_rate": 1.5e-3}
    return {
        "paired views (default of before)": (paired, rate),
        "clean views": (clean, rate),
        "clean views, rate 1e-4": (clean, quick),
        "clean views, rate 1e-4, distil 3": ({**clean, "distill_weight": 3.0}, quick),
        "clean views, rate 1e-4, no distillation": ({**clean, "distill_weight": 0.0, "label_boost": 0.0}, quick),
    }


_STATE: dict[str, Any] = {}


def _begin(device: str, folder: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the pictures and their names are not garbage: collections before a recording need not look at them
    _STATE.update(device=torch.device(device), bases={}, folder=Path(folder))


def _base(without: str) -> Classifier:
    """Tuned once; workers read what the first pass wrote."""
    if without not in _STATE["bases"]:
        path = _STATE["folder"] / f"base-{without}.pt"
        others = tuple(name for name in CLASSES if name not in without.split("+"))
        model = Classifier(towers_of(_STATE["packed"]), others, tuple((prompt(name),) for name in others), 0.05)
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        _STATE["bases"][without] = model.to(_STATE["device"]).requires_grad_(False)
    return _STATE["bases"][without]


def _make_base(without: str) -> str:
    model = tune_base(_STATE["packed"], without, _STATE["device"])
    torch.save(model.state_dict(), _STATE["folder"] / f"base-{without}.pt")
    return without


def bases_of(job: Job) -> str:
    """Classes that the model a job starts from was tuned without."""
    return job.target if job.after is None else f"{job.after}+{job.target}"


def _work(given: tuple[Job, tuple[str, ...]]) -> dict[str, Any]:
    job, judges = given
    packed, device = _STATE["packed"], _STATE["device"]
    try:
        base = _base(bases_of(job))
        if job.after is None:
            return run(packed, base, job, device, judges)[0]
        first, model = run(packed, base, replace(job, name="first round", target=job.after), device, judges)
        second, _ = run(packed, model, job, device, judges)
        return {**second, "first": first}
    except Exception as error:  # a failed run is reported beside the others
        traceback.print_exc()
        return {"name": job.name, "target": job.target, "size": job.size, "seed": job.seed, "error": repr(error)[:500]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("--data", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("run")
    two.add_argument("folder", type=Path)
    two.add_argument("--study", nargs="+", default=["settings", "main", "more"])
    two.add_argument("--out", type=Path, required=True, help="folder for one JSON file a study")
    two.add_argument("--chosen", type=Path, help="settings of an earlier run of the study `settings`: its JSON file")
    two.add_argument("--workers", type=int, default=1)
    two.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    two.add_argument("--seconds", type=float, default=math.inf, help="stop handing out runs after so long")
    two.add_argument("--runs", type=int, nargs=2, default=(0, None), help="only these runs of each study: from, to")
    three = commands.add_parser(
        "judge", help="the choices that today's rules make of recorded runs; rewrites the files"
    )
    three.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.data, arguments.out)
        return
    if arguments.command == "judge":
        for path in arguments.results:
            found = json.loads(path.read_text())
            found["runs"] = [rejudged(run) for run in found["runs"]]
            path.write_text(json.dumps(found, separators=(",", ":")))
        return
    run_studies(arguments)


def run_studies(arguments: argparse.Namespace) -> None:
    """Every study in turn; settings come before what uses them."""
    began = time.perf_counter()
    _STATE["packed"] = load(arguments.folder)
    print(f"pictures decoded in {time.perf_counter() - began:.0f} s", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = {key: tried[0] for key, tried in SETTINGS.items()}
    if arguments.chosen:
        chosen = choose_settings(json.loads(arguments.chosen.read_text())["runs"])
        print(json.dumps(chosen), flush=True)
    planned = {study: len(studies(study, chosen)[slice(*arguments.runs)]) for study in arguments.study}
    print(f"{sum(planned.values())} runs: {planned}", flush=True)
    context = multiprocessing.get_context("fork")
    with context.Pool(arguments.workers, _begin, (arguments.device, str(arguments.folder))) as pool:
        for study in arguments.study:
            jobs = studies(study, chosen)[slice(*arguments.runs)]
            results: list[dict[str, Any]] = []
            path = arguments.out / f"scenes-{study}.json"
            judges = {"research": ("dev", "spare"), "settings": ("dev",)}.get(study, ("dev", "test", "sealed"))
            for without in pool.imap_unordered(_make_base, _missing(jobs, arguments.folder)):
                print(f"base without {without} after {time.perf_counter() - began:.0f} s", flush=True)
            for result in pool.imap_unordered(_work, [(job, judges) for job in jobs]):
                results.append(result)
                late = time.perf_counter() - began > arguments.seconds
                if len(results) % 20 == 0 or late:
                    print(f"{study} {len(results)}/{len(jobs)} after {time.perf_counter() - began:.0f} s", flush=True)
                    _write(path, results, arguments.device, chosen)
                if late:
                    pool.terminate()
                    return
            _write(path, results, arguments.device, chosen)
            failed = [one for one in results if "error" in one]
            print(
                f"{study}: {len(results)} runs, {len(failed)} failed, {time.perf_counter() - began:.0f} s", flush=True
            )
            print(*failed[:3], sep="\n", flush=True)
            if study == "settings":
                chosen = choose_settings(results)
                print(json.dumps(chosen), flush=True)


def _missing(jobs: Sequence[Job], folder: Path) -> list[str]:
    """Old models that are not there yet."""
    return [one for one in sorted({bases_of(job) for job in jobs}) if not (folder / f"base-{one}.pt").exists()]


def _write(path: Path, results: list[dict[str, Any]], device: str, chosen: Any) -> None:
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor()
    head = {"machine": machine, "commit": commit(), "torch": torch.__version__, "settings": chosen}
    path.write_text(json.dumps({**head, "runs": results}, separators=(",", ":")))


if __name__ == "__main__":
    main()
