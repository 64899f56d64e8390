"""What a model was made with: images that it was trained on or chosen by, and those that are sealed from it.

The record is a file in the model folder, ``seen.parquet``, and goes wherever the model goes. A model that is made from
another one inherits its record. An image is listed by short keys of its file and of its pixels, so that it is known
again under another name, in another format, or decoded by another version of a library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.data.task import Role
from holdfast.errors import FaultError, UserError
from holdfast.files import fingerprint_file, image_key, write_atomic

if TYPE_CHECKING:  # a model folder is read without what reads sources
    from holdfast.data.assemble import Assembled
    from holdfast.data.catalogue import Catalogue
    from holdfast.data.roles import Assigned
    from holdfast.data.survey import Survey

FILE = "seen.parquet"
SEEN = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),  # key of the example id
        pa.field("picture", pa.string(), nullable=False),  # key of the hash of the pixels
        pa.field("use", pa.string(), nullable=False),
    ]
)


class Use(StrEnum):
    """What an image served a model, or its ancestors, as."""

    TRAINED = "trained"
    FITTED = "fitted"  # dev: chosen by, and the target's logit was fitted on it
    CHOSEN = "chosen"  # dev: looked at, and chosen by
    SEALED = "sealed"


class Record(StrEnum):
    """How much a record says, as ``model.json`` and ``result.json`` have it."""

    COMPLETE = "complete"  # every image
    PUBLISHED = "published"  # every image since the weights were published by others
    PARTIAL = "partial"  # some images: an ancestor came from elsewhere
    UNKNOWN = "unknown"  # none


_STRONGEST = (Use.TRAINED, Use.FITTED, Use.CHOSEN, Use.SEALED)
# An image of this role may not have been used so by the old model: it would judge what it taught.
_FORBIDDEN: dict[Role, tuple[Use, ...]] = {
    Role.DEV: (Use.TRAINED,),
    Role.SEALED: (Use.TRAINED, Use.FITTED, Use.CHOSEN),
    Role.TEST: (Use.TRAINED, Use.FITTED, Use.CHOSEN),
}


@dataclass(frozen=True)
class Seen:
    """The record of a model.

    ``complete``: it lists every image of this user that served the model or an ancestor. False where an ancestor came
    from elsewhere: what that one saw is not known. ``published``: the first ancestor is weights that others published.
    They knew nothing of this user's roles, so their images are not in the list; which ones they were nobody says.
    """

    uses: Mapping[tuple[str, str], Use] = field(default_factory=dict[tuple[str, str], Use])  # (file, picture) -> use
    complete: bool = False
    published: bool = False

    @classmethod
    def of(cls, images: Iterable[tuple[str, str, Use]], *, complete: bool = True) -> Seen:
        """From example ids, hashes of pixels and uses."""
        uses: dict[tuple[str, str], Use] = {}
        for identity, picture, use in images:
            _note(uses, (image_key(identity), image_key(picture)), use)
        return cls(uses, complete)

    def and_then(self, later: Seen) -> Seen:
        """What a model has seen that was made from this one. An image that was sealed may be trained on later."""
        uses = dict(self.uses)
        for key, use in later.uses.items():
            _note(uses, key, use)
        return Seen(uses, self.complete and later.complete, self.published or later.published)

    def keys(self, *uses: Use) -> set[str]:
        """Keys of the images that had one of the uses."""
        return {key for pair, use in self.uses.items() if use in uses for key in pair}

    def counts(self) -> dict[str, int]:
        """Images by use."""
        found = list(self.uses.values())
        return {use.value: found.count(use) for use in Use if use in found}

    def describe(self) -> dict[str, Any]:
        """As ``model.json`` and ``result.json`` say it."""
        if self.complete:
            record = Record.PUBLISHED if self.published else Record.COMPLETE
        else:
            record = Record.PARTIAL if self.uses else Record.UNKNOWN
        return {"record": record.value, **self.counts()}

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the record into a model folder; what its ``model.json`` says of it."""
        rows = sorted((*pair, use.value) for pair, use in self.uses.items())
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        table = pa.table(dict(zip(SEEN.names, (list(column) for column in columns), strict=True)), schema=SEEN)
        write_atomic(folder / FILE, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        return {**self.describe(), "fingerprint": fingerprint_file(folder / FILE)}


DRAWN = Seen(complete=True)  # of weights drawn by seed
PUBLISHED = Seen(complete=True, published=True)  # of weights that are asked for by name
UNKNOWN = Seen()  # of a model from elsewhere


def _note(uses: dict[tuple[str, str], Use], key: tuple[str, str], use: Use) -> None:
    if key not in uses or _STRONGEST.index(use) < _STRONGEST.index(uses[key]):
        uses[key] = use


def read_seen(folder: Path, description: Mapping[str, Any]) -> Seen:
    """The record of the model in a folder; ``description`` is its ``model.json``, which may know of none."""
    described = description.get("seen")
    if not isinstance(described, Mapping):
        return UNKNOWN
    path = folder / FILE
    if not path.is_file() or fingerprint_file(path) != described.get("fingerprint"):
        raise FaultError(
            f"{path} is {'gone' if not path.exists() else 'not the one that was written'}",
            expected="the record of the images that the model was made with",
            do="copy the model folder again from where it was made",
        )
    rows = pq.read_table(path, schema=SEEN).to_pylist()
    uses = {(row["file"], row["picture"]): Use(row["use"]) for row in rows}
    record = described.get("record")
    return Seen(uses, record in (Record.COMPLETE, Record.PUBLISHED), record == Record.PUBLISHED)


def seen_in_round(assembled: Assembled, *, fitted: bool = False) -> Seen:
    """What a round trains on and chooses by; base images are those that its old model was made with.

    ``fitted``: the images that it chooses by have taught the target's logit as well.
    """
    data, pictures = assembled.data, assembled.pictures
    trained = [*data.target.ids, *data.negatives.ids, *data.constraint.ids, *_with_role(assembled.roles, Role.BASE)]
    dev = Use.FITTED if fitted else Use.CHOSEN
    groups = ((trained, Use.TRAINED), (data.dev.ids, dev), (data.sealed_ids, Use.SEALED))
    return Seen.of((item, pictures.get(item, item), use) for ids, use in groups for item in ids)


def seen_in_tuning(main: Catalogue, assigned: Assigned, trained: Collection[str]) -> Seen:
    """What a base model is trained on, and which images of its sources are dev or sealed."""
    pictures = dict(zip(map(str, main.column("example_id")), main.pictures(), strict=True))
    dev, sealed = ([assigned.ids[p] for p in assigned.where(role)] for role in (Role.DEV, Role.SEALED))
    groups = ((trained, Use.TRAINED), (dev, Use.CHOSEN), (sealed, Use.SEALED))
    return Seen.of((item, pictures[item], use) for ids, use in groups for item in ids)


def _with_role(roles: pa.Table, role: Role) -> list[str]:
    pairs = zip(roles["example_id"].to_pylist(), roles["role"].to_pylist(), strict=True)
    return [identity for identity, value in pairs if value == role.value]


def refuse_seen(surveyed: Survey, seen: Seen, start: Path) -> None:
    """A round may not judge by images that its old model, or an ancestor of it, was trained on or chosen by."""
    assigned = surveyed.assigned
    found: list[str] = []
    for role, uses in _FORBIDDEN.items():
        positions = assigned.where(role)
        for use in uses:
            keys = seen.keys(use)
            count = sum(
                image_key(assigned.ids[p]) in keys or image_key(assigned.pictures[p]) in keys for p in positions
            )
            if count:
                how = {Use.TRAINED: "trained on", Use.FITTED: "fitted on"}.get(use, "chosen by")
                found.append(f"{count} of {len(positions)} {role.value} images were {how}")
    if found:
        raise UserError(
            f"the old model {start} was made with images that this round would judge by",
            expected="dev images that it was not trained on; sealed and test images that it has never seen",
            found="; ".join(found),
            do="give `holdfast tune` and the round the same [data] (source and roles), so that each image keeps its "
            "role; or start from a model that was made so, or judge by new images. Nothing was trained, and no query "
            "was spent",
        )
