"""Retention on real photographs: Intel scenes, a two-tower model from real pretrained parts, all methods.

    python benchmarks/scenes.py prepare --data DATA --out FOLDER    # once, needs holdfast[parts]; minutes on a CPU
    python benchmarks/scenes.py run FOLDER --study main --out benchmarks/results/scenes.json

``prepare`` shares out the roles (base 300, dev 200, sealed 690 images a class, the rest constraint), aligns an
EfficientNet-lite0 with cached MiniLM sentence features on Flickr8k's captions, and packs pictures and texts into one
folder. ``run`` tunes a base model without the target, develops it with every method and writes every single run.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import platform
import subprocess
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from holdfast.config import TrainConfig
from holdfast.config.methods import METHOD_CONFIGS
from holdfast.data.loaders import ViewSettings
from holdfast.data.tasks import LabelledSet, PairSet, RoundData, TaskSpec
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.efficientnet import FEATURES, EfficientNetLite0
from holdfast.model.interpolate import interpolate
from holdfast.model.towers import Preprocess, TwoTowers
from holdfast.runtime import Runtime, derive_seed, generator
from holdfast.train.loop import Plan, train

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


def prompt(name: str) -> str:
    return TEMPLATES[0].format(WORDS[name])


class PackedTowers(TwoTowers):
    """EfficientNet-lite0 with an adapter; texts are rows of a table of sentence features, made beforehand."""

    def __init__(self, texts: Sequence[str], table: Tensor) -> None:
        super().__init__()
        mean, std = 127 / 255, 128 / 255
        self.preprocess = Preprocess(SIZE, (mean,) * 3, (std,) * 3)
        self.embed_dim, self.text_width = DIM, WIDTH
        self.rows = {text: row for row, text in enumerate(texts)}
        self.image = EfficientNetLite0().to(memory_format=torch.channels_last)
        self.adapter = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)
        )
        self.weight = nn.Parameter(torch.randn(WIDTH, DIM) * WIDTH**-0.5)
        self.register_buffer("table", table, persistent=False)
        self.eval()

    def image_features(self, images: Tensor) -> Tensor:
        larger = F.interpolate(images, scale_factor=ENLARGE, mode="bilinear")
        return self.adapter(self.image(larger.contiguous(memory_format=torch.channels_last)))

    def text_backbone(self, tokens: Tensor) -> Tensor:
        return self.table[tokens[:, 0]].to(self.weight.dtype)

    @property
    def projection(self) -> Tensor:
        return self.weight

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[self.rows[text]] for text in texts])

    def spec(self) -> dict[str, Any]:
        return {"kind": "packed"}

    def image_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.image.parameters(), *self.adapter.parameters()]

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
    towers.image.load_state_dict(parts.image.state_dict())
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


def _set(packed: Packed, role: str, classes: Sequence[str], keep: np.ndarray | None = None) -> LabelledSet:
    """Examples of a role, labelled by their place in ``classes``."""
    index = {CLASSES.index(name): place for place, name in enumerate(classes)}
    chosen = [p for p in np.flatnonzero(packed.roles == role) if packed.labels[p] in index]
    rows = np.array(chosen if keep is None else [p for p in chosen if p in set(keep.tolist())], dtype=np.int64)
    labels = np.array([index[packed.labels[p]] for p in rows], dtype=np.int64)
    return LabelledSet(packed.pixels, rows, labels, tuple(packed.ids[p] for p in rows))


def draw(packed: Packed, name: str, size: int | None, seed: int) -> np.ndarray:
    """``size`` constraint images of a class, by seed."""
    rows = np.flatnonzero((packed.roles == "constraint") & (packed.labels == CLASSES.index(name)))
    return rows if size is None else rows[generator(seed, "constraint", name).permutation(len(rows))[:size]]


def round_data(packed: Packed, target: str, size: int | None, seed: int, target_size: int | None = None) -> RoundData:
    protected = tuple(name for name in CLASSES if name != target)
    classes = (*protected, target)
    chosen = np.concatenate([draw(packed, name, size, seed) for name in protected])
    own = draw(packed, target, target_size, seed)
    sentences = [template.format(WORDS[target]) for template in TEMPLATES]
    texts = tuple(sentences[i % len(sentences)] for i in range(len(own)))
    first = len(packed.ids)
    negatives = np.arange(first, first + len(packed.captions))
    constraint = _set(packed, "constraint", classes, chosen)
    return RoundData(
        tasks=TaskSpec(target, protected, tuple((prompt(name),) for name in classes)),
        target=PairSet(packed.pixels, own, texts, tuple(packed.ids[p] for p in own)),
        negatives=PairSet(
            packed.pixels, negatives, tuple(packed.captions), tuple(f"flickr-{i}" for i in range(len(negatives)))
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


def tune_base(packed: Packed, target: str, device: torch.device, steps: int = 300) -> Classifier:
    """The old model: tuned on base images of the other classes by cross-entropy; it never saw the target."""
    others = tuple(name for name in CLASSES if name != target)
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
    method = build_method(model, METHOD_CONFIGS["cross_entropy"](heads=False), steps).to(device)
    method.prepare(model, data)
    train(method, data, Plan(config, ViewSettings(True, "paired", (0.7, 1.0), True), 0, "base", steps), Runtime(device))
    return model.requires_grad_(False)


@torch.no_grad()
def scores(model: Classifier, examples: LabelledSet, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Correct (bool) and probability of the right class, for each example."""
    matrix, view = model.class_matrix(), model.preprocess
    right, chance = [], []
    for start in range(0, len(examples), 500):
        here = slice(start, start + 500)
        logits = model.logits(view.normalise(examples.images(here).to(device)), matrix)
        labels = torch.from_numpy(examples.labels[here]).to(device)
        right.append(logits.argmax(1) == labels)
        chance.append(logits.softmax(1).gather(1, labels[:, None]).squeeze(1))
    return torch.cat(right).cpu().numpy(), torch.cat(chance).cpu().numpy()


TRAIN: dict[str, Any] = {
    "steps": 300,
    "batch": 64,
    "images_per_task": 10,
    "learning_rate": 1e-4,
    "weight_decay": 0.05,
    "warmup_steps": 20,
    "precision": "auto",
    "log_every": 100,
    "flip": True,
}
WALK = (0.25, 0.5, 0.75, 1.0)


def run(
    packed: Packed, base: Classifier, job: Job, device: torch.device, judges: tuple[str, ...], walk: Sequence[float]
) -> dict[str, Any]:
    """Develop once and look at the judges (dev, test, sealed, or spare: constraint images left over) at every look."""
    began = time.perf_counter()
    data = round_data(packed, job.target, job.size, job.seed)
    spec = data.tasks
    old = base.with_classes(spec.classes, spec.prompts, 0.05).frozen_copy()
    model = old.copy()
    for parameter in model.towers.parameters():
        parameter.requires_grad_(True)
    config = TrainConfig(**{**TRAIN, **job.train, "device": str(device)})
    settings = METHOD_CONFIGS[job.method["name"]](**job.method)
    method = build_method(model, settings, config.steps)
    if method.linear:
        model.towers.weight.requires_grad_(False)
        model.use_linear()
    elif method.uses_heads:
        model.begin_round(32, derive_seed(job.seed, "heads"))
    method.to(device)
    method.prepare(old, data)
    method.to(device)
    sets = {name: _judge(packed, data, name, job) for name in judges}
    before = {name: scores(old, one, device) for name, one in sets.items()}
    looks: list[dict[str, Any]] = []

    def look(done: int, method: Method) -> dict[str, Any]:
        last = done == config.steps
        for walked in walk if last else (1.0,):
            there = method.model if walked == 1 else interpolate(old, method.model, walked).to(device)
            record: dict[str, Any] = {"step": done, "lambda": walked}
            for name, examples in sets.items():
                record[name] = _changes(examples, before[name], scores(there, examples, device), spec)
            looks.append(record)
        return {}

    views = ViewSettings(True, getattr(settings, "views", "clean"), config.crop_scale, config.flip)
    train(
        method, data, Plan(config, views, job.seed, "scenes", max(1, config.steps // 4)), Runtime(device), evaluate=look
    )
    return {
        "name": job.name,
        "target": job.target,
        "size": job.size,
        "seed": job.seed,
        "method": job.method,
        "train": job.train,
        "old": {name: _accuracy(one, before[name], spec) for name, one in sets.items()},
        "looks": looks,
        "seconds": round(time.perf_counter() - began, 2),
    }


def _judge(packed: Packed, data: RoundData, name: str, job: Job) -> LabelledSet:
    if name == "dev":
        return data.dev
    if name == "spare":  # constraint images that this run does not train on: a judge for research, never test or sealed
        used = set(data.constraint.rows.tolist())
        spare = [draw(packed, one, None, job.seed) for one in data.tasks.classes]
        keep = np.concatenate([np.array([p for p in rows if p not in used])[-500:] for rows in spare])
        return _set(packed, "constraint", data.tasks.classes, keep)
    return data.open_test() if name == "test" else data.open_sealed()


def _accuracy(examples: LabelledSet, score: tuple[np.ndarray, np.ndarray], spec: TaskSpec) -> dict[str, float]:
    return {name: round(float(score[0][examples.of_class(k)].mean()), 4) for k, name in enumerate(spec.classes)}


def _changes(examples: LabelledSet, before: Any, after: Any, spec: TaskSpec) -> dict[str, list[float]]:
    """Per class: images, gained, lost, mean and spread of the change in the right class's probability."""
    result = {}
    for k, name in enumerate(spec.classes):
        here = examples.of_class(k)
        change = after[1][here] - before[1][here]
        gained, lost = int((after[0][here] & ~before[0][here]).sum()), int((~after[0][here] & before[0][here]).sum())
        result[name] = [len(here), gained, lost, round(float(change.mean()), 5), round(float(change.std()), 5)]
    return result


# -- studies ----------------------------------------------------------------------------------------------------------


def studies(name: str) -> list[Job]:
    """The jobs of a study, in the order in which they are run."""
    if name == "research":
        variants = research_variants()
        return [
            Job(key, target, 100, seed, method, settings)
            for key, (method, settings) in variants.items()
            for target in ("forest", "sea")
            for seed in (0,)
        ]
    raise SystemExit(f"no study {name!r}")


def research_variants() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What was tried on the way to the defaults, at 100 constraint images a task."""
    paired: dict[str, Any] = {"name": "holdfast", "views": "paired", "gamma_tasks": 0.2}
    dual = {**paired, "beta": 20.0, "dual_rate": 2.0, "replay": 1.0}
    soft = {**paired, "constraint": "soft_error", "beta": 500.0, "replay": 1.0}
    return {
        "published": ({"name": "holdfast"}, {}),
        "paired-soft": ({"name": "holdfast", "views": "paired", "constraint": "soft_error", "beta": 2000.0}, {}),
        "replay": ({**paired, "beta": 50.0, "replay": 1.0}, {}),
        "dual-replay": (dual, {}),
        "dual-replay3": ({**dual, "replay": 3.0}, {}),
        "dual-replay-reserve.1": ({**dual, "reserve": 0.1}, {}),
        "soft-replay": (soft, {}),
        "soft-dual-replay": ({**soft, "beta": 200.0, "dual_rate": 20.0}, {}),
        "soft-dual-replay3": ({**soft, "beta": 200.0, "dual_rate": 20.0, "replay": 3.0}, {}),
        "soft-dual-replay-lr3e-5": ({**soft, "beta": 200.0, "dual_rate": 20.0}, {"learning_rate": 3e-5}),
        "soft-dual-replay-20": ({**soft, "beta": 200.0, "dual_rate": 20.0}, {"images_per_task": 20}),
        "rm1": ({"name": "rm", "alpha": 1.0}, {}),
        "rm10": ({"name": "rm", "alpha": 10.0}, {}),
        "cross_entropy": ({"name": "cross_entropy"}, {}),
    }


_STATE: dict[str, Any] = {}


def _begin(device: str, folder: str, judges: tuple[str, ...], walk: tuple[float, ...]) -> None:
    torch.set_num_threads(1)
    _STATE.update(device=torch.device(device), bases={}, folder=Path(folder), judges=judges, walk=walk)


def _base(target: str) -> Classifier:
    """Tuned once; workers read what the first pass wrote."""
    if target not in _STATE["bases"]:
        path = _STATE["folder"] / f"base-{target}.pt"
        others = tuple(name for name in CLASSES if name != target)
        model = Classifier(towers_of(_STATE["packed"]), others, tuple((prompt(name),) for name in others), 0.05)
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        _STATE["bases"][target] = model.to(_STATE["device"]).requires_grad_(False)
    return _STATE["bases"][target]


def _make_base(target: str) -> str:
    model = tune_base(_STATE["packed"], target, _STATE["device"])
    torch.save(model.state_dict(), _STATE["folder"] / f"base-{target}.pt")
    return target


def _work(job: Job) -> dict[str, Any]:
    try:
        return run(_STATE["packed"], _base(job.target), job, _STATE["device"], _STATE["judges"], _STATE["walk"])
    except Exception as error:  # a failed run is reported beside the others
        return {"name": job.name, "target": job.target, "size": job.size, "seed": job.seed, "error": repr(error)[:500]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("--data", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("run")
    two.add_argument("folder", type=Path)
    two.add_argument("--study", default="main")
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--workers", type=int, default=1)
    two.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    two.add_argument("--seconds", type=float, default=math.inf, help="stop handing out runs after so long")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.data, arguments.out)
        return
    jobs = studies(arguments.study)
    targets = sorted({job.target for job in jobs})
    print(f"{len(jobs)} runs over the targets {', '.join(targets)}", flush=True)
    judges = ("dev", "spare") if arguments.study == "research" else ("dev", "test", "sealed")
    began = time.perf_counter()
    _STATE["packed"] = load(arguments.folder)
    print(f"pictures decoded in {time.perf_counter() - began:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    context = multiprocessing.get_context("fork")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with context.Pool(arguments.workers, _begin, (arguments.device, str(arguments.folder), judges, WALK)) as pool:
        for target in pool.imap_unordered(_make_base, targets):
            print(f"base without {target} after {time.perf_counter() - began:.0f} s", flush=True)
        for result in pool.imap_unordered(_work, jobs):
            results.append(result)
            late = time.perf_counter() - began > arguments.seconds
            if len(results) % 20 == 0 or late:
                print(f"{len(results)}/{len(jobs)} after {time.perf_counter() - began:.0f} s", flush=True)
                _write(arguments.out / f"{arguments.study}.json", results, arguments.device)
            if late:
                pool.terminate()
                break
    _write(arguments.out / f"{arguments.study}.json", results, arguments.device)
    failed = [one for one in results if "error" in one]
    print(f"{len(results)} runs, {len(failed)} failed, {time.perf_counter() - began:.0f} s", *failed[:3], sep="\n")


def _write(path: Path, results: list[dict[str, Any]], device: str) -> None:
    commit = (
        os.environ.get("HOLDFAST_COMMIT")
        or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    )
    machine = (
        torch.cuda.get_device_name()
        if device.startswith("cuda") and torch.cuda.is_available()
        else platform.processor()
    )
    path.write_text(json.dumps({"machine": machine, "commit": commit, "torch": torch.__version__, "runs": results}))


if __name__ == "__main__":
    main()
