"""What a source holds: a listing of examples before their bytes were read, a catalogue with content hashes after.

An example's id is the SHA-256 of its content: what roles are drawn by, the same wherever the file lies. Which picture
it shows is the hash of its decoded pixels (:func:`holdfast.data.images.picture_id`): files with the same pixels are
one picture, and have one role.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from PIL import Image

from holdfast.data.identity import PictureCache
from holdfast.data.images import BadImage, open_image, to_rgb
from holdfast.errors import UserError

if TYPE_CHECKING:  # a plan lists and hashes: pyarrow is imported where somebody asks for the table
    import pyarrow as pa

    from holdfast.data.round import Pixels

Item = TypeVar("Item")
Result = TypeVar("Result")


ALONE = 0.05  # seconds of work before threads are started: hashing some hundred small files takes less
# The columns of a catalogue, and whether every example has a value there.
COLUMNS = {
    "example_id": True,
    "class": False,
    "caption": False,
    "split": False,
    "source": True,
    "locator": True,  # where a person finds it
    "reader": True,  # which reader of the catalogue
    "index": True,  # where that reader finds it
    "picture": False,  # hash of the decoded pixels, where it is known
    "group": False,  # video, patient, …: examples of one group are not independent
}


@cache
def catalogue_schema() -> pa.Schema:
    """The columns of a catalogue as a table."""
    import pyarrow as pa

    numbers = {"reader": pa.int32(), "index": pa.int64()}
    return pa.schema([pa.field(name, numbers.get(name, pa.string()), not full) for name, full in COLUMNS.items()])


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
        from holdfast.data.dedup.signatures import SIDE, SMALL, thumbnail

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


class Catalogue:
    """The examples of one or more sources with their content hashes, and the readers that find them.

    Its columns are lists, or the table that they become when it is first asked for.
    """

    def __init__(
        self,
        content: pa.Table | Mapping[str, Sequence[Any]],
        readers: tuple[Reader, ...],
        problems: tuple[Problem, ...] = (),
    ) -> None:
        self._content = content
        self.readers = readers
        self.problems = problems

    @property
    def table(self) -> pa.Table:
        """The examples as a table, in the columns of :func:`catalogue_schema`."""
        if isinstance(self._content, Mapping):
            import pyarrow as pa

            schema = catalogue_schema()
            arrays = [pa.array(self._content[column.name], column.type) for column in schema]
            self._content = pa.Table.from_arrays(arrays, schema=schema)
        return self._content

    def __len__(self) -> int:
        return len(self._content["example_id"])

    def column(self, name: str) -> list[str | None]:
        """One column as a list."""
        content = self._content
        return list(content[name]) if isinstance(content, Mapping) else content[name].to_pylist()

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
    if len(catalogues) == 1:
        return catalogues[0]
    if not catalogues:
        return Catalogue(dict.fromkeys(COLUMNS, ()), ())
    import pyarrow as pa

    schema = catalogue_schema()
    tables: list[pa.Table] = []
    readers: list[Reader] = []
    for catalogue in catalogues:
        moved = pa.array([number + len(readers) for number in catalogue.table["reader"].to_pylist()], pa.int32())
        tables.append(catalogue.table.set_column(schema.get_field_index("reader"), schema.field("reader"), moved))
        readers.extend(catalogue.readers)
    problems = tuple(problem for catalogue in catalogues for problem in catalogue.problems)
    return Catalogue(pa.concat_tables(tables), tuple(readers), problems)


def build(listing: Listing, *, limit: float = 1.0, workers: int = 4) -> Catalogue:
    """Read every entry's bytes once and note their hash, and that of the pixels.

    What cannot be read is skipped up to ``limit``, a share.
    """
    problems = list(listing.problems)
    rows: list[tuple[int, str, str | None]] = []
    bad: list[Problem] = []
    positions = range(len(listing.entries))
    cache = PictureCache(expected=len(listing.entries))

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
    columns: dict[str, Sequence[Any]] = {
        "example_id": [identity for _, identity, _ in rows],
        "class": [entry.label for entry in entries],
        "caption": [entry.caption for entry in entries],
        "split": splits,
        "source": [listing.name] * len(rows),
        "locator": [entry.locator for entry in entries],
        "reader": [0] * len(rows),
        "index": [listing.indices[position] for position, _, _ in rows],
        "picture": [picture for _, _, picture in rows],
        "group": [entry.group for entry in entries],
    }
    return Catalogue(columns, (listing.reader,), (*problems, *bad))


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
    alone = ALONE
    for item in remaining:
        begin = perf_counter()
        result = work(item)
        alone -= perf_counter() - begin
        yield result
        if alone < 0.0:
            break
    else:
        return

    def several(few: Sequence[Item]) -> list[Result]:
        return [work(item) for item in few]

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers) as pool:
        while batch := list(islice(remaining, 64 * workers)):
            # A few at once: to hand a single small file to a thread costs as much as to hash it.
            for results in pool.map(several, [batch[at : at + 8] for at in range(0, len(batch), 8)]):
                yield from results
