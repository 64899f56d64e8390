"""What a source holds: a listing of examples before their bytes were read, a catalogue with content hashes after.

An example's id is the SHA-256 of its content: what roles are drawn by, the same wherever the file lies. Which picture
it shows is the hash of its decoded pixels (:func:`holdfast.data.images.picture_id`): files with the same pixels are
one picture, and have one role.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
from PIL import Image

from holdfast.data.containers import printable
from holdfast.data.dedup.signatures import SIDE, SMALL, thumbnail
from holdfast.data.identity import PictureCache
from holdfast.data.images import BadImage, open_image, to_rgb
from holdfast.data.round import Pixels
from holdfast.errors import UserError

CATALOGUE = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("class", pa.string()),
        pa.field("caption", pa.string()),
        pa.field("split", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("locator", pa.string(), nullable=False),  # where a person finds it
        pa.field("reader", pa.int32(), nullable=False),  # which reader of the catalogue
        pa.field("index", pa.int64(), nullable=False),  # where that reader finds it
        pa.field("picture", pa.string()),  # hash of the decoded pixels, where it is known
        pa.field("group", pa.string()),  # video, patient, …: examples of one group are not independent
    ]
)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """Something that was found and dealt with: counted and reported, never silent."""

    kind: str  # "unreadable", "duplicate", …: what they are counted by
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}" + (f" ({self.detail})" if self.detail else "")


def count_problems(problems: Iterable[Problem]) -> dict[str, int]:
    """How many there are of each kind."""
    return dict(Counter(problem.kind for problem in problems))


def number_of(example_id: str, purpose: str = "role") -> float:
    """A uniform number in [0, 1) that depends on the content and the purpose alone."""
    digest = hashlib.sha256(f"holdfast {purpose} {example_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class Reader(Protocol):
    """Reads the examples of one source by their index."""

    def content(self, index: int) -> bytes:
        """The bytes that the example's id is the hash of."""
        ...

    def image(self, index: int) -> Image.Image:
        """The decoded picture: upright RGB, or :class:`~holdfast.data.images.BadImage`."""
        ...

    def thumb(self, index: int) -> tuple[np.ndarray, bool]:
        """Grey thumbnail for comparisons, and whether the picture is too small to be compared by it."""
        ...

    def prepared(self, size: int, interpolation: str) -> Pixels | None:
        """Evaluation views of this size made before (row = index), or None: decode them from :meth:`image`."""
        ...


@dataclass(frozen=True)
class BytesReader:
    """A reader of encoded pictures, whatever they lie in: ``fetch`` turns an index into the bytes of a file."""

    fetch: Callable[[int], bytes]

    def content(self, index: int) -> bytes:
        """The encoded picture."""
        return self.fetch(index)

    def image(self, index: int) -> Image.Image:
        """The decoded picture."""
        return to_rgb(self._open(index))

    def thumb(self, index: int) -> tuple[np.ndarray, bool]:
        """Its thumbnail."""
        image = self._open(index)
        small = min(image.size) < SMALL
        if image.format == "JPEG":
            image.draft("RGB", (4 * SIDE, 4 * SIDE))  # decoding at a fraction of the size is enough here, and faster
        return thumbnail(to_rgb(image)), small

    def _open(self, index: int) -> Image.Image:
        try:
            content = self.fetch(index)
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from error
        return open_image(content)

    def prepared(self, size: int, interpolation: str) -> Pixels | None:
        """None: nothing is prepared."""
        return None


def content_and_image(reader: Reader, index: int) -> tuple[bytes, Image.Image]:
    """What is hashed and what is seen, with one read where the two are one file."""
    content = reader.content(index)
    return content, _decoded(reader, index, content)


@dataclass(frozen=True, slots=True)
class Entry:
    """One example of a listing."""

    locator: str
    label: str | None = None
    caption: str | None = None
    split: str | None = None
    id: str | None = None  # the content hash, where the source knows it already
    picture: str | None = None  # the hash of its pixels, where the source knows it already
    group: str | None = None  # what it was drawn with: a video, a patient


@dataclass
class Listing:
    """What a source names. Entry i is what the reader finds at ``indices[i]``, by default at i."""

    name: str
    entries: Sequence[Entry]
    reader: Reader
    problems: list[Problem] = field(default_factory=list[Problem])
    indices: Sequence[int] = ()
    decide_split: Callable[[str], str] | None = None  # the split by content hash, where the source's protocol says so

    def __post_init__(self) -> None:
        self.indices = self.indices or range(len(self.entries))


@dataclass(frozen=True)
class Catalogue:
    """The examples of one or more sources with their content hashes, and the readers that find them."""

    table: pa.Table
    readers: tuple[Reader, ...]
    problems: tuple[Problem, ...] = ()

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> list[str | None]:
        """One column as a list."""
        return self.table[name].to_pylist()

    def pictures(self) -> list[str]:
        """Which picture each row shows: the hash of its pixels, or its id where they are not known."""
        ids, pictures = self.column("example_id"), self.column("picture")
        known = {identity: picture for identity, picture in zip(ids, pictures, strict=True) if picture}
        return [
            picture or known.get(identity) or str(identity) for identity, picture in zip(ids, pictures, strict=True)
        ]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in order of appearance."""
        return tuple(name for name in dict.fromkeys(self.column("class")) if name is not None)


def join(catalogues: Sequence[Catalogue]) -> Catalogue:
    """Several catalogues as one."""
    tables: list[pa.Table] = []
    readers: list[Reader] = []
    for catalogue in catalogues:
        moved = pa.array([number + len(readers) for number in catalogue.table["reader"].to_pylist()], pa.int32())
        tables.append(catalogue.table.set_column(CATALOGUE.get_field_index("reader"), CATALOGUE.field("reader"), moved))
        readers.extend(catalogue.readers)
    table = pa.concat_tables(tables) if tables else CATALOGUE.empty_table()
    return Catalogue(
        table, tuple(readers), tuple(problem for catalogue in catalogues for problem in catalogue.problems)
    )


def build(listing: Listing, *, limit: float = 1.0, workers: int = 4) -> Catalogue:
    """Read every entry's bytes once and note their hash, and that of the pixels.

    What cannot be read is skipped up to ``limit``, a share.
    """
    problems = list(listing.problems)
    rows: list[tuple[int, str, str | None]] = []
    bad: list[Problem] = []
    positions = range(len(listing.entries))
    cache = PictureCache()

    def identify(position: int) -> tuple[str, str | None] | Problem:
        return _identify(listing, position, cache)

    try:
        for position, found in enumerate(in_order(identify, positions, workers)):
            if isinstance(found, Problem):
                bad.append(found)
            else:
                rows.append((position, *found))
    finally:
        cache.close()
    check_limit(bad, len(listing.entries), limit)
    entries = [listing.entries[position] for position, _, _ in rows]
    decide = listing.decide_split
    splits = [entry.split for entry in entries] if decide is None else [decide(identity) for _, identity, _ in rows]
    table = pa.table(
        {
            "example_id": pa.array([identity for _, identity, _ in rows], pa.string()),
            "class": pa.array([entry.label for entry in entries], pa.string()),
            "caption": pa.array([entry.caption for entry in entries], pa.string()),
            "split": pa.array(splits, pa.string()),
            "source": pa.array([listing.name] * len(rows), pa.string()),
            "locator": pa.array([entry.locator for entry in entries], pa.string()),
            "reader": pa.array([0] * len(rows), pa.int32()),
            "index": pa.array([listing.indices[position] for position, _, _ in rows], pa.int64()),
            "picture": pa.array([picture for _, _, picture in rows], pa.string()),
            "group": pa.array([entry.group for entry in entries], pa.string()),
        },
        schema=CATALOGUE,
    )
    return Catalogue(table, (listing.reader,), (*problems, *bad))


def _identify(listing: Listing, position: int, cache: PictureCache) -> tuple[str, str | None] | Problem:
    """Hashes of an entry's bytes and of its pixels; the second is None where the pixels cannot be known."""
    entry, index = listing.entries[position], listing.indices[position]
    if entry.id is not None:
        return entry.id, entry.picture
    try:
        content = listing.reader.content(index)
    except (OSError, BadImage) as error:
        kind = error.kind if isinstance(error, BadImage) else "unreadable"
        return Problem(kind, entry.locator, getattr(error, "strerror", None) or str(error))
    if not content:
        return Problem("unreadable", entry.locator, "the file is empty")
    identity = hashlib.sha256(content).hexdigest()
    return identity, cache.picture(identity, lambda: _decoded(listing.reader, index, content)) or None


def _decoded(reader: Reader, index: int, content: bytes) -> Image.Image:
    return to_rgb(open_image(content)) if isinstance(reader, BytesReader) else reader.image(index)


def check_limit(bad: Sequence[Problem], total: int, limit: float) -> None:
    """More unreadable pictures than the limit allows are an error that names the first of them."""
    if len(bad) <= limit * total:
        return
    shown = "; ".join(f"{item.where} ({item.detail})" for item in bad[:5]) + ("; …" if len(bad) > 5 else "")
    raise UserError(
        f"{len(bad)} of {total} pictures cannot be read",
        expected=f"at most {limit:.3g} of them (bad_image_limit)",
        found=shown,
        do="replace or remove them, or raise bad_image_limit in [data] to have them skipped",
    )


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """``map`` over threads, in order, with a bounded number of items under way: memory stays flat."""
    if workers <= 1:
        yield from map(work, items)
        return
    remaining = iter(items)

    def several(few: Sequence[Item]) -> list[Result]:
        return [work(item) for item in few]

    with ThreadPoolExecutor(workers) as pool:
        while batch := list(islice(remaining, 64 * workers)):
            # A few at once: to hand a single small file to a thread costs as much as to hash it.
            for results in pool.map(several, [batch[at : at + 8] for at in range(0, len(batch), 8)]):
                yield from results


def readable_name(path: Path) -> str:
    """A path as text that any file can hold: bytes that are no UTF-8 are escaped, accents have one spelling."""
    return unicodedata.normalize("NFC", printable(str(path)))
