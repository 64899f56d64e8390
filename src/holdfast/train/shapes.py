"""Rounds of a given shape, made up: random pictures in a packed file, captions of random words, random weights."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.config import TrainConfig
from holdfast.data.loader import ViewSettings, with_constraint_views
from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.data.sources.store import PackedPixels
from holdfast.data.task import TaskSpec
from holdfast.methods.base import Method
from holdfast.methods.forms import Form
from holdfast.methods.holdfast import Holdfast, HoldfastConfig, ResearchConfig
from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.model.towers import TwoTowers
from holdfast.runtime import Runtime
from holdfast.train.compute_mode import compute_mode
from holdfast.train.loop import TrainSpec

_WORDS = ("a", "of", "the", "in", "on", "with", "street", "fog", "light", "road", "car", "tree", "sky", "old", "house")


@dataclass(frozen=True)
class Shape:
    """What a step is made of."""

    architecture: str
    protected: int  # m
    batch: int  # target pairs and negatives
    tasks_per_step: int | None
    images_per_task: int
    prompt: str
    class_temperature: float
    target_pairs: int = 4096
    images: int = 2048  # pictures in the file; rows are used again
    constraint_per_task: int = 8
    size: int = 224  # pixels

    @property
    def pictures(self) -> int:
        """Of a step: pairs, negatives and constraint images."""
        return self.batch + (self.tasks_per_step or self.protected) * self.images_per_task


SHAPES = {
    "bdd100k": Shape("ViT-B-16", 5, 256, None, 10, "the weather is {}", 0.05, constraint_per_task=100),
    "places365": Shape("ViT-B-16", 364, 64, 240, 2, "the scene is a {}", 0.01),
    "tiny": Shape("tiny", 9, 64, None, 4, "a photo of a {}", 0.05, target_pairs=256, images=512, size=32),
    "small": Shape("parts-128", 6, 256, None, 17, "a photo of a {}", 0.05, constraint_per_task=100, size=128),
    "bdd100k-large": Shape("ViT-L-14", 5, 256, None, 10, "the weather is {}", 0.05, constraint_per_task=100),
    # Half the pairs: so many fit into the memory of one H200.
    "bdd100k-huge": Shape("ViT-H-14", 5, 128, None, 10, "the weather is {}", 0.05, constraint_per_task=100),
    "bdd100k-siglip": Shape("ViT-B-16-SigLIP", 5, 256, None, 10, "the weather is {}", 0.05, constraint_per_task=100),
}


def write_pictures(path: Path, count: int, size: int, seed: int = 0) -> PackedPixels:
    """A file of random pictures, laid out as a packed store lays out its own."""
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, count, 256):
            file.write(random.bytes(3 * size * size * min(256, count - start)))
    return PackedPixels(path, count, size)


def captions(count: int, seed: int = 0) -> tuple[str, ...]:
    """Captions of 4 to 28 words, 11 on average: with the two end tokens most fill 16 columns, the longest 30."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(2.3, 0.45, count), 4, 28).astype(int)
    return tuple(" ".join(random.choice(_WORDS, length)) for length in lengths)


def made_up_round(shape: Shape, pixels: PackedPixels, seed: int = 0, form: Form = "default") -> RoundData:
    """A round of a shape over the pictures of a file; in the default form constraint images have fixed views."""
    random = np.random.default_rng(seed)
    names = [f"{_WORDS[k % len(_WORDS)]} {k}" for k in range(shape.protected + 1)]

    def rows(count: int) -> np.ndarray:
        return random.integers(0, len(pixels), count)

    def pairs(count: int, texts: tuple[str, ...]) -> PairSet:
        return PairSet(pixels, rows(count), tuple(texts[i % len(texts)] for i in range(count)), ("",) * count)

    labels = np.repeat(np.arange(shape.protected), shape.constraint_per_task)
    constraint = LabelledSet(pixels, rows(len(labels)), labels, tuple(str(i) for i in range(len(labels))))
    texts = captions(min(shape.target_pairs, 4096), seed)
    data = RoundData(
        tasks=TaskSpec(names[-1], tuple(names[:-1]), tuple((shape.prompt.format(name),) for name in names)),
        target=pairs(shape.target_pairs, texts),
        negatives=pairs(10 * min(shape.target_pairs, 4096), texts),
        constraint=constraint,
        dev=constraint,
        open_test=lambda: constraint,
        open_sealed=lambda: constraint,
    )
    config = train_config(shape)
    views = ViewSettings(config.augment, "clean", config.crop_scale, config.flip)
    return with_constraint_views(data, views, config.constraint_views if form == "default" else 1, seed)


def train_config(shape: Shape, **changes: object) -> TrainConfig:
    """[train] of a shape."""
    return TrainConfig.model_validate(
        {
            "batch": shape.batch,
            "tasks_per_step": shape.tasks_per_step,
            "images_per_task": shape.images_per_task,
            **changes,
        }
    )


def made_up_towers(architecture: str) -> TwoTowers:
    """Towers with random weights. Nothing is fetched: a tokenizer that would be is made up, too."""
    towers = load_towers(architecture, None, seed=0)
    text = towers.spec().get("config", {}).get("text_cfg", {})
    if text.get("hf_tokenizer_name"):
        # SigLIP's tokenizer lies on a model hub. A step takes as long with any tokens of the right number and range.
        vars(towers)["_tokenizer"] = made_up_tokenizer(text["context_length"], text["vocab_size"])
    return towers


def made_up_tokenizer(context_length: int, vocab_size: int) -> Callable[[Sequence[str]], Tensor]:
    """A token a word, the same for the same word, filled up to the context's length with 1, as SigLIP's does."""

    def tokenize(texts: Sequence[str]) -> Tensor:
        tokens = torch.ones(len(texts), context_length, dtype=torch.int64)
        for row, text in zip(tokens, texts, strict=True):
            words = [2 + zlib.crc32(word.encode()) % (vocab_size - 2) for word in text.split()[: context_length - 1]]
            row[: len(words)] = torch.tensor(words, dtype=torch.int64)
        return tokens

    return tokenize


def made_up_run(
    shape: Shape,
    data: RoundData,
    config: TrainConfig,
    runtime: Runtime,
    *,
    paired: bool,
    form: Form = "default",
    towers: TwoTowers | None = None,
) -> tuple[Method, TrainSpec]:
    """The method over random weights, ready to be measured; over a copy of ``towers`` where they are given."""
    method_config = HoldfastConfig(form=form, research=ResearchConfig(views="paired" if paired else "clean"))
    towers = made_up_towers(shape.architecture) if towers is None else copy.deepcopy(towers)
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    old = Classifier(towers, data.tasks.classes, data.tasks.prompts, shape.class_temperature).to(runtime.device, dtype)
    new = old.copy()
    old.requires_grad_(False)
    if config.checkpoint_activations:
        new.towers.checkpoint_activations()
    method = Holdfast(new, method_config, config.steps)
    method.begin_heads(32, 0)
    with compute_mode(config, runtime.device, compiled=False):
        method.prepare(old, data)
    method.to(runtime.device)
    views = ViewSettings(
        config.augment, method_config.protected_views(), config.crop_scale, config.flip, config.rotation
    )
    return method, TrainSpec(config, views, 0, "made up", evaluate_every=config.steps)
