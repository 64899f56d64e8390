"""What an image tower says of sets of pictures, kept on disk between runs.

A round on a CPU spends nearly all of its time in a tower that does not move: the old model over dev and training
pictures, for the refit, and over everything where towers are frozen. The next run over the same pictures reads what
this one computed. What is kept is a batch, known by everything that its features depend on: pixels, views, weights,
precision and the arithmetic of the machine. A batch that is found is therefore the batch that would have been computed,
bit for bit. Where a tower ends in a linear layer, what that layer sees is kept: a model whose last layer alone moved
finds it, too.

Within a process neither file nor pictures are read a second time: which batch some rows of a set are is remembered for
as long as pictures and weights are the same objects, unchanged, and the batches that were used last stay in memory.

It is a cache: whatever is wrong with it, features are computed again. ``HOLDFAST_FEATURES=off`` leaves it out, and a
number is its limit in GiB; beyond it the batches that were used longest ago go. It lies in ``features`` of the cache
folder, which may be deleted at any time. Features of sealed and test pictures are never written. Sentences that are the
same in every process (names of known classes) are kept likewise.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from holdfast.data.identity import cache_folder
from holdfast.data.round import LabelledSet, PairSet, Pixels, View
from holdfast.data.transforms import normalize_views
from holdfast.errors import HoldfastError, UserError
from holdfast.files import canonical_json, is_temporary, read_regular, write_atomic
from holdfast.model.compute import active_mode
from holdfast.model.device_features import DeviceFeatures
from holdfast.model.same_weights import HeldWeights
from holdfast.model.towers import Preprocess, TwoTowers
from holdfast.model.workers import separate_threads

What = Literal["features", "hidden"]  # E1 before normalisation, or what the tower's last layer sees

LIMIT = 4.0  # GiB, where the environment says nothing
_FORMAT = 2
_NAME = "batch"
_BLOCK = 256  # pictures that are kept as one file
_PASS = 16  # pictures that a CPU's tower sees at once: more do not fit into its cache
_AHEAD = 1  # blocks that are begun while one is waited for
_DIGEST = hashlib.sha256().digest_size
_LONGEST = 1 << 30  # bytes of a batch
_LOOK_EVERY = 1 << 28  # bytes written between two looks at the size of the folder
_IN_MEMORY = 1 << 28  # bytes of the batches that a folder's store keeps in memory, too
_MOST_NAMES = 1 << 14  # blocks whose key is remembered
_ABANDONED = 3600.0  # seconds after which a file that somebody was writing is nobody's


class _Names:
    """Keys of blocks by what they were made of: a tower, rows of a set of pictures and their views."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int, bytes, bytes], tuple[ReferenceType[Pixels], str]] = {}

    def get(self, name: tuple[bytes, bytes, bytes], pixels: Pixels) -> str | None:
        """The key of a block of these pictures, if it was worked out before."""
        tower, rows, view = name
        found = self._known.get((tower, id(pixels), rows, view))
        return found[1] if found is not None and found[0]() is pixels else None

    def put(self, name: tuple[bytes, bytes, bytes], pixels: Pixels, key: str) -> None:
        """Remember it for as long as the pictures are there."""
        if len(self._known) >= _MOST_NAMES:
            self._known.clear()
        tower, rows, view = name
        self._known[tower, id(pixels), rows, view] = ref(pixels), key


@dataclass
class FeatureStore:
    """Batches of features in a folder; several processes may use it at once. Nobody may change a batch."""

    folder: Path
    limit: int  # bytes
    written: int = _LOOK_EVERY  # since the last look at the folder's size: the first batch looks
    names: _Names = field(default_factory=_Names, compare=False)
    on_device: DeviceFeatures = field(default_factory=DeviceFeatures, compare=False)  # of a GPU: never on disk
    _recent: OrderedDict[str, Tensor] = field(default_factory=OrderedDict[str, Tensor], compare=False)

    def get(self, key: str) -> Tensor | None:
        """The batch with this key; None where it is not at hand, or not whole."""
        found = self._recent.get(key)
        found = self._read(key) if found is None else found
        if found is not None:
            self._remember(key, found)
            with suppress(OSError):
                os.utime(self.folder / key)  # used now: it goes last
        return found

    def _remember(self, key: str, batch: Tensor) -> None:
        self._recent[key] = batch
        self._recent.move_to_end(key)
        total = sum(item.nbytes for item in self._recent.values())
        while total > min(_IN_MEMORY, self.limit):
            total -= self._recent.popitem(last=False)[1].nbytes

    def _read(self, key: str) -> Tensor | None:
        path = self.folder / key
        try:
            content = read_regular(path, _LONGEST)
            digest, tensors = content[:_DIGEST], content[_DIGEST:]
            if hashlib.sha256(tensors).digest() != digest:
                raise ValueError("not what was written")
            found = load(tensors)[_NAME]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, SafetensorError):
            with suppress(OSError):
                path.unlink()
            return None
        return found

    def put(self, key: str, batch: Tensor) -> None:
        """Keep a batch; where that is not possible on disk, in memory."""
        self._remember(key, batch.detach())
        tensors = save({_NAME: batch.detach().cpu().contiguous()})
        content = hashlib.sha256(tensors).digest() + tensors
        if len(content) > self.limit:
            return
        try:
            write_atomic(self.folder / key, lambda temporary: _write(temporary, content))
        except (HoldfastError, OSError):
            return
        self.written += len(content)
        if self.written > min(_LOOK_EVERY, self.limit // 4):
            self.written = 0
            self.prune()

    def prune(self) -> None:
        """Remove what was used longest ago until three quarters of the limit are left, and what nobody writes on."""
        entries: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for path in self.folder.iterdir():
                with suppress(OSError):  # another process removes, too
                    found = path.stat()
                    entries.append((found.st_mtime, found.st_size, path))
        newest = max((time for time, _, _ in entries), default=0.0)
        left = [entry for entry in entries if not is_temporary(entry[2])]
        gone = [path for time, _, path in entries if is_temporary(path) and time < newest - _ABANDONED]
        total = sum(size for _, size, _ in left)
        if total > self.limit:
            for _, size, path in sorted(left):
                if total <= self.limit * 3 // 4:
                    break
                gone.append(path)
                total -= size
        for path in gone:
            with suppress(OSError):
                path.unlink()


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


class MemoryStore:
    """Batches of features for as long as somebody holds it."""

    def __init__(self) -> None:
        self.names, self.on_device = _Names(), DeviceFeatures()
        self._kept: dict[str, Tensor] = {}

    def get(self, key: str) -> Tensor | None:
        """The batch with this key, if there is one."""
        return self._kept.get(key)

    def put(self, key: str, batch: Tensor) -> None:
        """Keep a batch."""
        self._kept[key] = batch


Store = FeatureStore | MemoryStore


def user_store() -> FeatureStore | None:
    """The user's own store; None where the environment switches it off."""
    given = os.environ.get("HOLDFAST_FEATURES", "").strip().lower()
    if given in ("off", "0", "no", "false"):
        return None
    try:
        limit = float(given) if given else LIMIT
        if not 0.0 < limit < 1e9:
            raise ValueError("no size")
    except ValueError as error:
        raise UserError(
            f"HOLDFAST_FEATURES = {given[:40]!r} is no size", expected="off, or a number of GiB such as 4"
        ) from error
    return FeatureStore(cache_folder() / "features", int(limit * 2**30))


_active: list[Store | None] = []


@contextmanager
def features_kept(store: Store | None) -> Generator[None]:
    """Inside the block :func:`encode_set` keeps what it computes; None keeps nothing."""
    _active.append(store)
    try:
        yield
    finally:
        _active.pop()


@torch.no_grad()
def encode_set(
    towers: TwoTowers,
    examples: LabelledSet | PairSet,
    like: Tensor,
    *,
    what: What = "features",
    positions: np.ndarray | None = None,
    batch: int = 256,
    view: View | None = None,
    preprocess: Preprocess | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """What the image tower says of a set, or of some of its positions, batch by batch, on the device of ``like``.

    Whoever encodes a whole set and needs no gradient goes through this. ``batch`` is that of a GPU. On a CPU passes are
    small, each in a thread of its own. What they say is kept: on a CPU in files, on a GPU in its memory.
    ``preprocess`` is the towers' own where it is left out.
    """
    preprocess, store = preprocess or towers.preprocess, _active[-1] if _active else None
    # Models that differ in the last layer alone (a refit and what it was made from) share what comes before it.
    projected = what == "features" and towers.image_projection is not None and active_mode() is None
    asked: What = "hidden" if projected else what
    if like.device.type == "cpu":
        encoded = _Blocks(towers, preprocess, asked, like.dtype, store).encoded(examples, positions, view)
    else:
        encoded = on_device(towers, preprocess, examples, like, asked, store, positions, batch, view)
    for here, found in encoded:
        yield here, towers.project(found) if projected else found


def on_device(
    towers: TwoTowers,
    preprocess: Preprocess,
    examples: LabelledSet | PairSet,
    like: Tensor,
    what: What,
    store: Store | None,
    positions: np.ndarray | None,
    batch: int,
    view: View | None,
) -> Iterator[tuple[slice, Tensor]]:
    """:func:`encode_set` where tensors lie on a GPU."""
    run = towers.image_features if what == "features" else towers.image_hidden
    if store is None:
        pictures = preprocess.batches(examples, like, positions=positions, batch=batch, view=view)
        return ((here, run(part)) for here, part in pictures)
    kind = _kind(towers, preprocess, what, like)
    weights = _weights(towers, last_layer=what == "features")
    return store.on_device.encoded(
        run, kind, weights, preprocess, examples, like, positions=positions, batch=batch, view=view
    )


def _kind(towers: TwoTowers, preprocess: Preprocess, what: What, like: Tensor) -> str:
    """What features on a GPU depend on, beside weights and pictures."""
    arithmetic = [torch.backends.cudnn.allow_tf32, *_precision(like.device.type)]
    return canonical_json([what, str(like.dtype), arithmetic, towers.spec(), preprocess.to_json()])


@torch.no_grad()
def encode_sentences(towers: TwoTowers, sentences: Sequence[str], *, batch: int = 100) -> Tensor:
    """What the text tower says of sentences that every process asks for, [n, text width]; kept as features are."""
    rows = [towers.tokenize(sentences[start : start + batch]) for start in range(0, len(sentences), batch)]
    store, key = user_store(), ""
    if store is not None:
        kind = canonical_json([_FORMAT, "sentences", _arithmetic(), torch.get_num_threads(), towers.spec()])
        digest = hashlib.sha256(kind.encode())
        for tensor in (*towers.text_backbone_parameters(), *towers.buffers(), *rows):
            digest.update(canonical_json([str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(_bytes(tensor))
        key = digest.hexdigest()
        found = store.get(key)
        if found is not None:
            return found
    computed = torch.cat([towers.text_backbone(tokens) for tokens in rows])
    if store is not None:
        store.put(key, computed)
    return computed


class _Blocks:
    """What an image tower says of a set on a CPU, block by block: found in a store, or computed by several threads."""

    def __init__(
        self, towers: TwoTowers, preprocess: Preprocess, what: What, dtype: torch.dtype, store: Store | None
    ) -> None:
        self.run = towers.image_features if what == "features" else towers.image_hidden
        self.preprocess, self.dtype, self.store = preprocess, dtype, store
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")  # a thread's own
        kind = canonical_json([_FORMAT, what, str(dtype), _arithmetic()])
        self.base = None if store is None else _tower_digest(kind, towers, preprocess, last_layer=what == "features")

    def encoded(
        self, examples: LabelledSet | PairSet, positions: np.ndarray | None, view: View | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Blocks in their order; while the threads compute one the next is read and looked up."""
        count = len(examples) if positions is None else len(positions)
        begun: deque[tuple[slice, _Block]] = deque()
        with separate_threads(torch.get_num_threads()) as threads:
            for start in range(0, count, _BLOCK):
                here = slice(start, min(start + _BLOCK, count))
                chosen = np.arange(here.start, here.stop) if positions is None else positions[here]
                begun.append((here, self._begin(threads, examples, chosen, None if view is None else view[here])))
                if len(begun) > _AHEAD:
                    yield self._end(*begun.popleft())
            while begun:
                yield self._end(*begun.popleft())

    def _begin(
        self, threads: ThreadPoolExecutor, examples: LabelledSet | PairSet, positions: np.ndarray, view: View | None
    ) -> _Block:
        key, pixels = "", None
        if self.store is not None and self.base is not None:
            name = self.base.digest(), examples.rows[positions].tobytes(), _view_bytes(view)
            known = self.store.names.get(name, examples.pixels)
            if known is None:
                pixels = examples.images(positions)
                known = _key(self.base.copy(), pixels, view)
                self.store.names.put(name, examples.pixels, known)
            key = known
            found = self.store.get(key)
            if found is not None:
                return _Block(key, found, [])
        pixels = examples.images(positions) if pixels is None else pixels
        parts = [slice(start, start + _PASS) for start in range(0, len(pixels), _PASS)]
        passes = [threads.submit(self._pass, pixels[part], None if view is None else view[part]) for part in parts]
        return _Block(key, None, passes)

    def _pass(self, pixels: Tensor, view: View | None) -> Tensor:
        """In a thread of its own."""
        enabled, dtype = self.autocast
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=enabled):
            return self.run(normalize_views(pixels, self.preprocess.mean, self.preprocess.std, view, self.dtype))

    def _end(self, here: slice, block: _Block) -> tuple[slice, Tensor]:
        if block.found is not None:
            return here, block.found
        computed = torch.cat([item.result() for item in block.passes])
        if self.store is not None:
            self.store.put(block.key, computed)
        return here, computed


@dataclass(frozen=True)
class _Block:
    """A block that was begun: what a store had of it, or the passes that compute it."""

    key: str
    found: Tensor | None
    passes: Sequence[Future[Tensor]]


class _Digest(Protocol):
    """A hash that is being computed."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> _Digest: ...
    def hexdigest(self) -> str: ...


def _add_tower(digest: _Digest, towers: TwoTowers, preprocess: Preprocess, *, last_layer: bool) -> None:
    """Architecture, preprocessing and weights of an image tower; buffers are statistics of its norms."""
    digest.update(canonical_json([towers.spec(), preprocess.to_json()]).encode())
    for tensor in _weights(towers, last_layer=last_layer):
        digest.update(canonical_json([str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))


_towers: WeakKeyDictionary[TwoTowers, dict[str, tuple[HeldWeights, _Digest]]] = WeakKeyDictionary()


def _tower_digest(kind: str, towers: TwoTowers, preprocess: Preprocess, *, last_layer: bool) -> _Digest:
    """The hash of all that a block depends on beside its pictures: of weights that did not change, found again."""
    weights = _weights(towers, last_layer=last_layer)
    name = canonical_json([kind, preprocess.to_json()])
    alike = [towers, *(item for item in list(_towers) if item is not towers and type(item) is type(towers))]
    for item in alike:
        held = _towers.get(item, {}).get(name)
        if held is not None and held[0].same(weights):
            _towers.setdefault(towers, {})[name] = held
            return held[1]
    digest = hashlib.sha256(kind.encode())
    _add_tower(digest, towers, preprocess, last_layer=last_layer)
    held_weights = HeldWeights.of(weights)
    if held_weights is not None:
        _towers.setdefault(towers, {})[name] = held_weights, digest
    return digest


def _weights(towers: TwoTowers, *, last_layer: bool) -> list[Tensor]:
    weights = towers.image_parameters() if last_layer else towers.image_backbone_parameters()
    return [*weights, *towers.buffers()]


def _key(digest: _Digest, pixels: Tensor, view: View | None) -> str:
    digest.update(canonical_json(list(pixels.shape)).encode())
    digest.update(_bytes(pixels))
    for part in _view_parts(view):
        digest.update(_bytes(part))
    return digest.hexdigest()


def _view_parts(view: View | None) -> tuple[Tensor, ...]:
    return () if view is None else (view.box, view.flip, *(() if view.angle is None else (view.angle,)))


def _view_bytes(view: View | None) -> bytes:
    return b"".join(_bytes(part) for part in _view_parts(view))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _arithmetic() -> list[object]:
    """What the bits of a product depend on beside its factors, on a CPU."""
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), _PASS, *_precision("cpu")]


def _precision(device: str) -> list[object]:
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
    exact = torch.are_deterministic_algorithms_enabled()
    return [torch.get_float32_matmul_precision(), autocast, repr(active_mode()), exact]
