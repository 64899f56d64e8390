"""A CLIP of our own for the test bed: a ViT and a text tower, trained from scratch on prompts and captions.

    python benchmarks/clip.py BED --out BED/models/seen --minutes 8             # has seen the constraint images
    python benchmarks/clip.py BED --out BED/models/unseen --minutes 6 --unseen  # has not
    python benchmarks/clip.py BED --out BED/models/small --steps 30 --layers 2 --width 64 --batch 32   # on a CPU

BED is made by benchmarks/bed.py. It trains on base images (and constraint images unless --unseen) of every set, the
target classes of the studies with --rare images each, and on captions. --out then holds one model folder a set, which a
study's `[round.model] start` takes, each with the record of the images it was made with, and clip.json.

The contrast is of each picture with one prompt of every class and the batch's captions, in both directions; pictures of
one class are all positives of its prompt, so that no two rows or columns stand for the same thing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bed import PARTS, Part, Row, read_rows
from benchmarks.machine import commit, machine
from holdfast.data.images import evaluation_view, open_image, to_rgb
from holdfast.data.seen import Seen, Use
from holdfast.model.classifier import Classifier, unit
from holdfast.model.folder import save_model
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.towers import Preprocess

TEMPLATES = ("{}", "{}.", "this is {}", "here we see {}", "an image: {}", "{}, small and blurry")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's own


@dataclass(frozen=True)
class Options:
    """Size of the model, and how long and how hard it is trained."""

    size: int = 64
    patch: int = 8
    width: int = 384
    layers: int = 12
    text_width: int = 256
    text_layers: int = 4
    batch: int = 1024
    steps: int | None = None  # None: as many as the minutes allow
    minutes: float = 8.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: float = 0.03  # share of the run
    temperature: float = 0.05  # fixed: the studies' tau_0
    smoothing: float = 0.1  # of the labels
    patch_dropout: float = 0.25
    mixed: float = 0.5  # share of pictures that are mixed with another
    rare: int = 8  # images of each target class
    unseen: bool = False
    compile: bool = False
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """OpenCLIP's description of the model."""
        head = 64 if self.width % 64 == 0 else 32
        vision = {"image_size": self.size, "patch_size": self.patch, "width": self.width, "head_width": head}
        text = {"context_length": 32, "vocab_size": 49408, "width": self.text_width}
        return {
            "embed_dim": min(256, self.width),
            "vision_cfg": {**vision, "layers": self.layers},
            "text_cfg": {**text, "heads": max(1, self.text_width // 64), "layers": self.text_layers},
        }


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """A set's pictures: what the model is trained on, and those that its zero-shot accuracy is measured on."""

    part: Part
    classes: tuple[str, ...]
    trained: tuple[Row, ...]
    dev: tuple[Row, ...]

    @property
    def phrases(self) -> list[str]:
        """The prompt of each class."""
        return [self.part.phrase(label) for label in self.classes]


def chosen(part: Part, rows: Sequence[Row], *, unseen: bool, rare: int) -> Labelled:
    """Which images of a set the model is made of: base, constraint images unless ``unseen``, few of the target."""
    splits = ("base",) if unseen else ("base", "constraint")
    trained = [row for row in rows if row.split in splits and row.label != part.target]
    few = [row for row in rows if row.split == "base" and row.label == part.target]
    trained += sorted(few, key=lambda row: row.example_id)[:rare]
    dev = [row for row in rows if row.split == "dev"]
    return Labelled(part, tuple(sorted({row.label for row in rows})), tuple(trained), tuple(dev))


def decoded(bed: Path, rows: Sequence[Row], size: int) -> Tensor:
    """Evaluation views of pictures: uint8 [n, 3, size, size]."""

    def view(row: Row) -> np.ndarray:
        return evaluation_view(to_rgb(open_image((bed / row.filepath).read_bytes())), size)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        views = list(pool.map(view, rows))
    return torch.from_numpy(np.stack(views)) if views else torch.empty(0, 3, size, size, dtype=torch.uint8)


def captions_of(bed: Path, rows: Sequence[Row], archive: str, each: int = 5) -> list[list[str]]:
    """``each`` captions of every picture, repeated where it has fewer."""
    texts: dict[str, list[str]] = defaultdict(list)
    with (bed / archive / "captions.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            texts[f"{archive}/{line['filepath']}"].append(line["title"])
    return [[texts[row.filepath][place % len(texts[row.filepath])] for place in range(each)] for row in rows]


@dataclass(frozen=True)
class Pool:
    """All that is trained on, on the device: pictures with a class first, then those with captions."""

    images: Tensor  # [n, 3, S, S] uint8
    labels: Tensor  # [n_labelled] class over all sets
    prompts: Tensor  # [C, T, L] tokens of every class under every template
    captions: Tensor  # [n_captioned, 5, L]

    def batches(self, size: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pictures, tokens (a prompt of every class, then the captions) and which of these each picture belongs to.

        Without end; a pass over labelled pictures, or captioned ones, is a permutation. Shapes never change.
        """
        device = self.images.device
        labelled, captioned = len(self.labels), len(self.captions)
        with_captions = round(size * captioned / (labelled + captioned))
        classes = torch.arange(len(self.prompts), device=device)
        pictures = _passes(labelled, size - with_captions, random, device)
        others = _passes(captioned, with_captions, random, device)
        while True:
            first, second = next(pictures), next(others)
            template = _integers(self.prompts.shape[1], len(classes), random, device)
            which = _integers(self.captions.shape[1], with_captions, random, device)
            tokens = torch.cat([self.prompts[classes, template], self.captions[second, which]])
            own = len(classes) + torch.arange(with_captions, device=device)
            yield self.images[torch.cat([first, labelled + second])], tokens, torch.cat([self.labels[first], own])


def _integers(below: int, count: int, random: torch.Generator, device: torch.device) -> Tensor:
    return torch.randint(max(1, below), (count,), generator=random, device=device)


def _passes(count: int, each: int, random: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """``each`` of ``count`` places at a time: permutations one after the other."""
    left = torch.empty(0, dtype=torch.int64, device=device)
    while True:
        while len(left) < each:
            left = torch.cat([left, torch.randperm(count, generator=random, device=device)])
        yield left[:each]
        left = left[each:]


# -- views ------------------------------------------------------------------------------------------------------------


def random_views(images: Tensor, random: torch.Generator) -> Tensor:
    """Random crops (30 to 100 % of the area), mirrored, with other colours: float [n, 3, S, S] in [0, 1]."""
    count, device = len(images), images.device

    def draw(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=random, device=device) * (high - low) + low

    area, stretch = draw(0.3, 1.0), draw(-math.log(4 / 3), math.log(4 / 3)).exp()
    width, height = (area * stretch).sqrt().clamp(max=1), (area / stretch).sqrt().clamp(max=1)
    mirror = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    turned = torch.zeros(count, 2, 3, device=device)
    turned[:, 0, 0], turned[:, 1, 1] = width * mirror, height
    turned[:, 0, 2], turned[:, 1, 2] = draw(-1, 1) * (1 - width), draw(-1, 1) * (1 - height)
    grid = F.affine_grid(turned, list(images.shape), align_corners=False)
    pixels = F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)
    grey = pixels.mean(dim=1, keepdim=True)
    saturation = torch.where(draw(0, 1) < 0.1, torch.zeros(count, device=device), draw(0.6, 1.4))
    pixels = grey + (pixels - grey) * saturation.view(-1, 1, 1, 1)
    middle = pixels.mean(dim=(1, 2, 3), keepdim=True)
    pixels = (pixels - middle) * draw(0.6, 1.4).view(-1, 1, 1, 1) + middle * draw(0.6, 1.4).view(-1, 1, 1, 1)
    return pixels.clamp(0, 1)


def mixed_views(
    pixels: Tensor, targets: Tensor, share: float, cut: bool, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A share of the pictures mixed with another (or with a part of it cut in), and their targets alike."""
    count, side, device = len(pixels), pixels.shape[-1], pixels.device
    other = torch.randperm(count, generator=random, device=device)
    kept = torch.rand(count, generator=random, device=device)
    kept = torch.where(torch.rand(count, generator=random, device=device) < share, kept, torch.ones_like(kept))
    if cut:
        edge = ((1 - kept).sqrt() * side).round()
        corner = (torch.rand(2, count, generator=random, device=device) * (side - edge + 1)).floor()
        along = torch.arange(side, device=device)
        inside = [(along >= start[:, None]) & (along < (start + edge)[:, None]) for start in corner]
        hole = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
        pixels, kept = torch.where(hole, pixels[other], pixels), 1 - (edge / side) ** 2
    else:
        pixels = torch.lerp(pixels[other], pixels, kept.view(-1, 1, 1, 1))
    return pixels, torch.lerp(targets[other], targets, kept[:, None])


# -- training ---------------------------------------------------------------------------------------------------------


def contrast(images: Tensor, texts: Tensor, targets: Tensor, temperature: float, smoothing: float) -> Tensor:
    """Both directions of the contrast: [B, D], [M, D], and how much each picture is of each text, [B, M].

    Pictures against texts: cross-entropy to ``targets``, smoothed. Texts against pictures: cross-entropy to the share
    that each picture has of a text, over the texts that have any.
    """
    logits = images @ texts.T / temperature
    smooth = (1 - smoothing) * targets + smoothing / targets.shape[1]
    of_pictures = -(smooth * logits.log_softmax(dim=1)).sum(dim=1).mean()
    share = targets.sum(dim=0)
    spread = -(targets * logits.log_softmax(dim=0)).sum(dim=0) / share.clamp(min=1e-6)
    present = (share > 1e-3).float()
    return (of_pictures + (spread * present).sum() / present.sum().clamp(min=1)) / 2


def pretrain(towers: OpenClipTowers, pool: Pool, options: Options) -> dict[str, Any]:
    """Train both towers to the end of their steps or minutes; steps, seconds and the last loss."""
    from open_clip.transformer import PatchDropout

    device = pool.images.device
    random = torch.Generator(device).manual_seed(options.seed)
    torch.manual_seed(options.seed)
    towers.model.visual.patch_dropout = PatchDropout(options.patch_dropout).train()  # it has no weights
    encode = torch.compile(towers.image_features) if options.compile else towers.image_features
    matrices = [item for item in towers.parameters() if item.requires_grad and item.ndim > 1]
    rest = [item for item in towers.parameters() if item.requires_grad and item.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    began, loss, done = time.perf_counter(), torch.tensor(0.0), 0
    for done, (pictures, tokens, labels) in enumerate(pool.batches(options.batch, random), start=1):
        passed = _passed(options, done - 1, time.perf_counter() - began)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(passed, options.warmup)
        targets = F.one_hot(labels, len(tokens)).float()
        pixels, targets = mixed_views(random_views(pictures, random), targets, options.mixed, done % 2 == 0, random)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            images = encode((pixels - mean) / std)
            texts = towers.text_backbone(tokens) @ towers.projection
        loss = contrast(unit(images), unit(texts), targets, options.temperature, options.smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(matrices + rest, 1.0)
        optimizer.step()
        if done % 20 == 0 or passed >= 1:
            value, seconds = loss.item(), time.perf_counter() - began  # waits for the device
            if done % 200 == 0:
                print(f"step {done}: loss {value:.3f}, {done * options.batch / seconds:,.0f} pictures/s", flush=True)
        if _passed(options, done, time.perf_counter() - began) >= 1:
            break
    towers.model.visual.patch_dropout = nn.Identity()
    compact(towers, pool)
    seconds = time.perf_counter() - began
    return {"steps": done, "seconds": round(seconds, 1), "loss": round(loss.item(), 4)}


@torch.no_grad()
def compact(towers: OpenClipTowers, pool: Pool) -> None:
    """Weights rounded to half precision, and no embedding for tokens that no text had: models are easy to carry."""
    for item in towers.parameters():
        item.copy_(item.half())
    table = towers.model.token_embedding.weight
    used = torch.cat(
        [pool.prompts.flatten(), pool.captions.flatten(), towers.tokenize(["a photo of"]).to(table.device)[0]]
    )
    unused = torch.ones(len(table), dtype=torch.bool, device=table.device)
    unused[used] = False
    table[unused] = 0


def _passed(options: Options, steps: int, seconds: float) -> float:
    """The share of the run that is over."""
    return steps / options.steps if options.steps is not None else seconds / (60 * options.minutes)


def _schedule(passed: float, warmup: float) -> float:
    """Linear rise, cosine decay to zero."""
    if passed < warmup:
        return max(0.01, passed / warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (passed - warmup) / (1 - warmup))))


# -- from tables to model folders -------------------------------------------------------------------------------------


def make(bed: Path, out: Path, options: Options, device: torch.device, parts: dict[str, Part]) -> dict[str, Any]:
    """Train on what the tables say, measure zero-shot accuracy on dev images, write the model folders."""
    sets = [chosen(part, read_rows(bed / f"{name}.csv"), unseen=options.unseen, rare=options.rare)
            for name, part in parts.items() if name != "captions" and (bed / f"{name}.csv").exists()]  # fmt: skip
    torch.manual_seed(options.seed)
    towers = OpenClipTowers("custom", options.config, Preprocess(options.size, MEAN, STD)).to(device)
    pool, captioned = _pool(bed, sets, parts, towers, options.size, device)
    report: dict[str, Any] = {
        "options": asdict(options),
        "images": {item.part.name: len(item.trained) for item in sets} | {"captions": len(captioned)},
        "parameters": sum(item.numel() for item in towers.parameters()),
    }
    print(json.dumps(report["images"]), f"{report['parameters']:,} parameters", flush=True)
    report |= pretrain(towers, pool, options)
    uses = [(row, Use.TRAINED) for item in sets for row in item.trained] + [(row, Use.TRAINED) for row in captioned]
    uses += [(row, Use.CHOSEN) for item in sets for row in item.dev]
    seen = Seen.of((row.example_id, row.picture, use) for row, use in uses)
    for item in sets:
        model = Classifier(towers, item.classes, [[phrase] for phrase in item.phrases], options.temperature)
        model.to(device).eval()
        report[item.part.name] = accuracy(model, decoded(bed, item.dev, options.size), item)
        save_model(model, out / item.part.name, extra={"made_by": "benchmarks/clip.py"}, seen=seen)
    return report | {"machine": machine(), "commit": commit()}


def _pool(
    bed: Path, sets: Sequence[Labelled], parts: dict[str, Part], towers: OpenClipTowers, size: int, device: torch.device
) -> tuple[Pool, list[Row]]:
    table = bed / "captions.csv"
    captioned = [row for row in read_rows(table) if row.split == "base"] if table.exists() else []
    names = [(item.part.name, label) for item in sets for label in item.classes]
    places = {name: place for place, name in enumerate(names)}
    labels = [places[item.part.name, row.label] for item in sets for row in item.trained]
    prompts = [[template.format(phrase) for template in TEMPLATES] for item in sets for phrase in item.phrases]
    texts = captions_of(bed, captioned, parts["captions"].archive) if captioned else []
    rows = [row for item in sets for row in item.trained] + captioned
    return Pool(
        decoded(bed, rows, size).to(device),
        torch.tensor(labels, device=device),
        _tokens(towers, prompts, len(TEMPLATES)).to(device),
        _tokens(towers, texts, 5).to(device),
    ), captioned


def _tokens(towers: OpenClipTowers, groups: Sequence[Sequence[str]], each: int) -> Tensor:
    """[n, each, L]."""
    flat = [text for group in groups for text in group]
    tokens = towers.tokenize(flat) if flat else torch.empty(0, 32, dtype=torch.int64)
    return tokens.view(len(groups), each, tokens.shape[1])


@torch.no_grad()
def accuracy(model: Classifier, images: Tensor, item: Labelled, batch: int = 1024) -> dict[str, float]:
    """Zero-shot accuracy on dev images: mean and least of the protected classes, and the target."""
    device = next(model.parameters()).device
    matrix, right = model.class_matrix(), defaultdict[str, list[bool]](list)
    for start in range(0, len(images), batch):
        pixels = model.preprocess.normalise(images[start : start + batch].to(device))
        found = model.logits(pixels, matrix).argmax(dim=1).tolist()
        for row, place in zip(item.dev[start : start + batch], found, strict=True):
            right[row.label].append(item.classes[place] == row.label)
    shares = {label: sum(values) / len(values) for label, values in right.items()}
    target = shares.pop(item.part.target, float("nan"))
    protected = list(shares.values())
    return {"protected": sum(protected) / len(protected), "weakest": min(protected), "target": target}


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    defaults = Options()
    for name, value in asdict(defaults).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true")
        else:
            kind = int if value is None else type(value)
            parser.add_argument(option, type=kind, default=value)
    given = vars(parser.parse_args())
    bed, out, device = given.pop("bed"), given.pop("out"), torch.device(given.pop("device"))
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    report = make(bed, out, Options(**given), device, PARTS)
    (out / "clip.json").write_text(json.dumps(report, indent=1) + "\n")
    for name in PARTS:
        if name in report:
            figures = ", ".join(f"{key} {100 * value:.1f} %" for key, value in report[name].items())
            print(f"{name}: {figures} (zero-shot, dev images)")
    print(f"{report['steps']} steps in {report['seconds']:.0f} s; models in {out}")


if __name__ == "__main__":
    main()
