"""From positions to batches. What a step draws is a pure function of (seed, step).

There is no sampler state that a checkpoint could forget: resuming at step t draws what step t would have drawn. Draws
are made for all ranks together, without repeats; each rank reads its share (:meth:`holdfast.runtime.Runtime.share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.data.round import (
    Batch,
    Draw,
    Images,
    Kept,
    KeptImages,
    KeptTexts,
    LabelledSet,
    PairSet,
    RoundData,
    TextRows,
    Texts,
    View,
)
from holdfast.data.transforms import fixed_views, normalize_views_at_once, random_views
from holdfast.errors import UserError
from holdfast.runtime import Runtime, derive_seed, generator, stream_for


class Pool:
    """Positions 0 … size-1, shuffled anew each epoch; a step takes the next ``take`` of them.

    The tail of an epoch that would not fill a step is left out, so that no step repeats a position.
    """

    def __init__(self, size: int, take: int, *name: int | str) -> None:
        self.size, self.take, self.name = size, min(take, size), name
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def draw(self, step: int) -> np.ndarray:
        """Positions of one step."""
        if self.take == 0:
            return np.empty(0, dtype=np.int64)
        epoch, place = divmod(step, self.size // self.take)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, generator(*self.name, epoch).permutation(self.size)
        return self._order[place * self.take : (place + 1) * self.take]


@dataclass(frozen=True)
class BatchSizes:
    """How much of everything a step takes, over all ranks together."""

    target: int
    negatives: int
    tasks: int | None  # |B_c|; None: all of them
    per_task: int  # |B_k|


class RoundSampler:
    """Draws the positions of a step: target pairs, negatives, protected tasks and their minibatches."""

    def __init__(self, data: RoundData, sizes: BatchSizes, seed: int) -> None:
        m = data.tasks.num_protected
        if len(data.target) == 0:
            raise UserError("the target has no training pairs", do="add images of the target class, or pairs")
        if len(data.negatives) == 0:
            raise UserError("there are no negatives to contrast the target with", do="set data.negatives")
        self.seed = seed
        self._target = Pool(len(data.target), sizes.target, seed, "target")
        self._negatives = Pool(len(data.negatives), sizes.negatives, seed, "negatives")
        self._tasks = Pool(m, sizes.tasks or m, seed, "tasks")
        self._of_task = [data.constraint.of_class(k) for k in range(m)]
        self._images = [
            Pool(len(positions), sizes.per_task, seed, "images", data.tasks.protected[k])
            for k, positions in enumerate(self._of_task)
        ]

    def draw(self, step: int) -> Draw:
        """What step ``step`` (from 0) is made of."""
        tasks = np.sort(self._tasks.draw(step))
        protected = [self._of_task[k][self._images[k].draw(step)] for k in tasks]
        return Draw(
            target=self._target.draw(step),
            negatives=self._negatives.draw(step),
            tasks=tasks,
            protected=np.concatenate(protected) if protected else np.empty(0, dtype=np.int64),
            view_seed=derive_seed(self.seed, "views", step),
        )


class Tokenizing(Protocol):
    """What is asked of a model's towers to make a batch."""

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts -> int64 tokens [n, L]."""
        ...

    def shorten(self, tokens: Tensor) -> Tensor:
        """The tokens without columns that change no feature."""
        ...

    def lengths(self, tokens: Tensor) -> Tensor | None:
        """Tokens of each text up to its end; None where texts cannot share rows."""
        ...


@dataclass(frozen=True)
class Begun:
    """A batch whose copies and views may still be under way on the loader's stream."""

    batch: Batch
    done: Any = None  # an event of the loader's stream

    def wait(self) -> Batch:
        """The batch, safe to use on the current stream; the host does not wait."""
        if self.done is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.done)
            _record(self.batch, stream)
        return self.batch


def _record(values: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that every tensor in here is in use on the stream."""
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, Tensor):
            value.record_stream(stream)
        elif is_dataclass(value):
            _record(value, stream)


@dataclass(frozen=True)
class ViewSettings:
    """Which pictures are seen through random views, and how far a view may stray."""

    augment_pairs: bool  # target pairs and negatives
    protected: str  # "clean", "paired" (one random view, for both models) or "mismatched" (random; the old sees clean)
    crop_scale: tuple[float, float]
    flip: bool
    rotation: float = 0.0  # degrees, either way
    two: bool = False  # target and protected pictures are seen through a second random view, too


_MOST_VIEWS = 10_000  # of all constraint images together: the old model is asked about each of them


def with_constraint_views(data: RoundData, settings: ViewSettings, each: int, seed: int) -> RoundData:
    """The data with ``each`` fixed views of every constraint image; fewer where these are many, or views are clean."""
    images = len(data.constraint)
    each = min(each, _MOST_VIEWS // max(1, images))
    if each < 2 or not settings.augment_pairs or settings.protected != "clean":
        return data
    views = fixed_views(
        images,
        each,
        derive_seed(seed, "constraint views"),
        crop_scale=settings.crop_scale,
        flip=settings.flip,
        rotation=settings.rotation,
    )
    return replace(data, constraint_views=views)


class Tokens:
    """Tokens of a set's texts, made when a text is first drawn; texts that many pairs share are kept once."""

    def __init__(self, texts: Sequence[str], tokenize: Callable[[Sequence[str]], Tensor]) -> None:
        place = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        self._texts, self._tokenize = list(place), tokenize
        self._place = np.fromiter((place[text] for text in texts), dtype=np.int64, count=len(texts))
        self._done = np.zeros(len(place), dtype=bool)
        self._tokens: np.ndarray | None = None  # [distinct, L] int32

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, positions: np.ndarray) -> Tensor:
        rows = self._place[positions]
        missing = np.unique(rows[~self._done[rows]])
        if len(missing) or self._tokens is None:
            made = self._tokenize([self._texts[row] for row in missing]).numpy()
            if self._tokens is None:
                self._tokens = np.zeros((len(self._texts), made.shape[1]), dtype=np.int32)
            self._tokens[missing], self._done[missing] = made, True
        return torch.from_numpy(self._tokens[rows].astype(np.int64))


_Pictures = tuple[Images, Images, Images]  # target, negatives, protected


@dataclass(frozen=True)
class _PromptRows:
    """What is known before the first step of how texts share rows."""

    lengths: np.ndarray  # [P] of the prompts
    columns: int
    width: int
    rows: int


class BatchMaker:
    """Turns a :class:`Draw` into this rank's :class:`Batch`: reads pixels, moves them over, makes the views there.

    On a GPU this happens on a stream of its own, so that copies and views run beside the step before.
    """

    def __init__(
        self,
        data: RoundData,
        towers: Tokenizing,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        views: ViewSettings,
        runtime: Runtime,
        dtype: torch.dtype = torch.float32,
        *,
        kept_as: torch.dtype | None = None,  # type of the finished pictures, where it is not the one they are made in
        prompts: Tensor | None = None,  # tokens of the class prompts, where texts are to share rows with them
        pairs: tuple[int, int] = (0, 0),  # target pairs and negatives of a step, to plan those rows
        images: KeptImages | None = None,  # features of a frozen image tower: no picture is read then
        texts: KeptTexts | None = None,  # features of a frozen text tower
    ) -> None:
        self.images, self.texts = images, texts
        self.data, self.views, self.runtime, self.dtype = data, views, runtime, dtype
        self.mean, self.std, self.kept_as = mean, std, kept_as or dtype
        self._towers, self._shorten = towers, towers.shorten
        self._target_tokens = Tokens(data.target.texts, towers.tokenize)
        self._negative_tokens = Tokens(data.negatives.texts, towers.tokenize)
        self._prompts = self._plan_prompts(prompts, pairs)
        self._columns = 0  # of tokens, in the widest step so far
        self._stream = stream_for(runtime.device, "loader") if runtime.device.type == "cuda" else None

    def begin(self, draw: Draw) -> Begun:
        """This rank's part of the step, on its way; :meth:`Begun.wait` hands it to the stream that computes."""
        if self._stream is None:
            return Begun(self.make(draw))
        with torch.cuda.stream(self._stream):
            return Begun(self.make(draw), self._stream.record_event())

    def make(self, draw: Draw) -> Batch:
        """This rank's part of the step."""
        share, data, over, texts = self.runtime.share, self.data, self._to_device, self.texts
        target, negatives, protected = share(draw.target), share(draw.negatives), share(draw.protected)
        target_index, negative_index = over(torch.from_numpy(target)), over(torch.from_numpy(negatives))
        protected_index = over(torch.from_numpy(protected))
        rows = self._view_rows(draw)
        target_tokens, negative_tokens = self._tokens(draw)
        target_images, negative_images, protected_images = (
            self._read(draw, target, negatives, protected, rows)
            if self.images is None
            else _kept(self.images, target_index, negative_index, protected_index)
        )
        return Batch(
            target_images=target_images,
            target_texts=Texts(over(target_tokens), texts and texts.target.rows(target_index)),
            target_index=target_index,
            negative_images=negative_images,
            negative_texts=Texts(over(negative_tokens), texts and texts.negatives.rows(negative_index)),
            negative_index=negative_index,
            protected_images=protected_images,
            protected_task=over(torch.from_numpy(data.constraint.labels[protected])),
            protected_index=protected_index,
            tasks=over(torch.from_numpy(draw.tasks)),
            target_total=len(draw.target),
            negative_total=len(draw.negatives),
            protected_total=len(draw.protected),
            text_rows=None if texts else self._rows(target_tokens, negative_tokens),
            prompts=texts and texts.prompts,
            target_images_again=self._again(draw, "target", data.target, target, len(draw.target)),
            protected_images_again=self._again(draw, "protected", data.constraint, protected, len(draw.protected)),
            protected_view=None if rows is None else over(rows),
        )

    def _again(
        self, draw: Draw, which: str, examples: PairSet | LabelledSet, positions: np.ndarray, total: int
    ) -> Images | None:
        """The same pictures through another random view, where a step has two."""
        if not self.views.two:
            return None
        view = self._views(total, derive_seed(draw.view_seed, which, "again"))
        return self._normalized(self._pixels(examples, positions), view)

    def _read(
        self, draw: Draw, target: np.ndarray, negatives: np.ndarray, protected: np.ndarray, rows: Tensor | None
    ) -> _Pictures:
        """Pictures as each is seen in this step."""
        data, pair_views = self.data, self._pair_views(draw)
        return (
            self._normalized(self._pixels(data.target, target), pair_views and pair_views[0]),
            self._normalized(self._pixels(data.negatives, negatives), pair_views and pair_views[1]),
            self._normalized(self._pixels(data.constraint, protected), self._protected_view(draw, rows)),
        )

    def _tokens(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Tokens of this rank's pairs without columns that change no feature of any rank's: ranks record together.

        Where texts share rows no column is ever computed, and as many are kept as any step has needed so far: a step
        can be recorded and played back only if its shapes stay.
        """
        own = slice(self.runtime.rank, None, self.runtime.world)
        of_all = self._shorten(self._target_tokens[draw.target]), self._shorten(self._negative_tokens[draw.negatives])
        both = of_all[0][own].contiguous(), of_all[1][own].contiguous()
        if self._prompts is None:
            return both
        self._columns = max(self._columns, *(tensor.shape[1] for tensor in both))
        padded = [torch.nn.functional.pad(tensor, (0, self._columns - tensor.shape[1])) for tensor in both]
        return padded[0], padded[1]

    def _to_device(self, values: Tensor) -> Tensor:
        if self.runtime.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.runtime.device, non_blocking=True)

    def _pixels(self, examples: PairSet | LabelledSet, positions: np.ndarray) -> Tensor:
        return self._to_device(examples.images(positions))

    def _normalized(self, pixels: Tensor, view: View | None) -> Images:
        return Images(normalize_views_at_once(pixels, self.mean, self.std, view, self.dtype, self.kept_as))

    def _plan_prompts(self, prompts: Tensor | None, pairs: tuple[int, int]) -> _PromptRows | None:
        """Lengths of the prompts, and rows for a typical step: a function of the data, so that resuming finds it."""
        lengths = None if prompts is None else self._towers.lengths(prompts)
        if prompts is None or lengths is None:
            return None
        tokens = int(lengths.sum())
        for count, texts in zip(pairs, (self._target_tokens, self._negative_tokens), strict=True):
            sample = self._towers.lengths(texts[np.arange(min(512, len(texts)))])
            mean = 0.0 if sample is None or not len(sample) else float(sample.double().mean())
            tokens += int(mean * -(-count // self.runtime.world))
        from holdfast.kernels.text_packing import row_width, rows_for  # towers that know lengths have kernels

        width = row_width(self._target_tokens[np.arange(1)].shape[1])
        return _PromptRows(lengths.numpy(), prompts.shape[1], width, rows_for(tokens, width))

    def _rows(self, target: Tensor, negatives: Tensor) -> TextRows | None:
        """How this step's texts share rows, in the order in which they are encoded."""
        prompts = self._prompts
        if prompts is None:
            return None
        from holdfast.kernels.text_packing import plan_rows

        lengths = [self._towers.lengths(target), self._towers.lengths(negatives)]
        together = np.concatenate([*(length.numpy() for length in lengths if length is not None), prompts.lengths])
        columns = max(target.shape[1], negatives.shape[1], prompts.columns)
        return plan_rows(together, columns, prompts.width, prompts.rows).map(self._to_device)

    def _views(self, count: int, seed: int) -> View:
        # Drawn for all ranks together, then shared out: a picture's view does not depend on the number of ranks.
        settings = self.views
        views = random_views(
            count, seed, crop_scale=settings.crop_scale, flip=settings.flip, rotation=settings.rotation
        )
        return views[slice(self.runtime.rank, None, self.runtime.world)]

    def _pair_views(self, draw: Draw) -> tuple[View, View] | None:
        if not self.views.augment_pairs:
            return None
        return (
            self._views(len(draw.target), derive_seed(draw.view_seed, "target")),
            self._views(len(draw.negatives), derive_seed(draw.view_seed, "negatives")),
        )

    def _view_rows(self, draw: Draw) -> Tensor | None:
        """Which of its fixed views each of this rank's constraint images is seen through, where they have several."""
        each = self.data.views_each
        if each == 1 or self.views.protected != "clean":
            return None
        random = np.random.default_rng(derive_seed(draw.view_seed, "constraint views"))
        rows = draw.protected * each + random.integers(0, each, len(draw.protected))
        return torch.from_numpy(self.runtime.share(rows))

    def _protected_view(self, draw: Draw, rows: Tensor | None) -> View | None:
        if self.views.protected == "clean":
            views = self.data.constraint_views
            return None if rows is None or views is None else views[rows]
        return self._views(len(draw.protected), derive_seed(draw.view_seed, "protected"))


def _kept(images: KeptImages, target: Tensor, negatives: Tensor, protected: Tensor) -> _Pictures:
    """Features in place of pictures, at the positions of this step."""

    def rows(kept: Kept, positions: Tensor) -> Images:
        return Images(None, kept.rows(positions))

    return rows(images.target, target), rows(images.negatives, negatives), rows(images.protected, protected)


def batches(sampler: RoundSampler, maker: BatchMaker, start: int, stop: int, ahead: int = 2) -> Iterator[Batch]:
    """Batches of steps ``start`` … ``stop``-1, read ``ahead`` of time in a thread."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
        waiting: list[Future[Begun]] = []
        for step in range(start, stop):
            while len(waiting) <= ahead and step + len(waiting) < stop:
                waiting.append(reader.submit(_one, sampler, maker, step + len(waiting)))
            yield waiting.pop(0).result().wait()


def _one(sampler: RoundSampler, maker: BatchMaker, step: int) -> Begun:
    return maker.begin(sampler.draw(step))
