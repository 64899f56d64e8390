"""What was understood of a source: counts, sizes, kinds of files, problems, and a sheet of example pictures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from holdfast.data.catalogue import BytesReader, Catalogue, Problem, in_order
from holdfast.data.images import BadImage, decoding, is_animated, open_image, to_rgb
from holdfast.files import write_atomic

_ORIENTATION = 0x0112  # the EXIF tag that says how the camera was held


@dataclass
class Inspected:
    """What opening pictures showed."""

    pictures: int = 0
    formats: Counter[str] = field(default_factory=Counter[str])
    sizes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    treated: Counter[str] = field(default_factory=Counter[str])  # what had to be done to them
    problems: list[Problem] = field(default_factory=list[Problem])


def table_of(catalogue: Catalogue) -> dict[str, dict[str, int]]:
    """Class -> split -> examples, in order of appearance; "" stands for no class and no split."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for label, split in zip(catalogue.column("class"), catalogue.column("split"), strict=True):
        counts[label or ""][split or ""] += 1
    return {label: dict(splits) for label, splits in counts.items()}


def copies(catalogue: Catalogue) -> list[Problem]:
    """Pictures that a source holds more than once, with what that means."""
    first: dict[str, int] = {}
    problems: list[Problem] = []
    locators = catalogue.column("locator")
    labels, splits = catalogue.column("class"), catalogue.column("split")
    for row, picture in enumerate(catalogue.pictures()):
        other = first.setdefault(picture, row)
        if locators[other] == locators[row]:
            continue
        kind = "duplicate"
        if labels[other] != labels[row]:
            kind = "contradicting labels"
        elif splits[other] != splits[row]:
            kind = "copy in another split"
        problems.append(Problem(kind, str(locators[row]), f"the same picture as {locators[other]}"))
    return problems


def inspect_pictures(
    catalogue: Catalogue, *, at_most: int = 0, workers: int = 2, progress: Callable[[int, int], None] | None = None
) -> Inspected:
    """Open and decode pictures, evenly spread over the source: ``at_most`` that many, 0 for all."""
    total = len(catalogue)
    wanted = total if at_most <= 0 else min(at_most, total)
    rows = np.unique(np.linspace(0, total - 1, wanted).round().astype(np.int64)) if total else np.zeros(0, np.int64)
    readers, indices = catalogue.table["reader"].to_pylist(), catalogue.table["index"].to_pylist()
    names = catalogue.column("locator")
    result = Inspected()

    def open_one(row: int) -> tuple[str, tuple[int, int], list[str]] | str:
        reader = catalogue.readers[readers[row]]
        try:
            if not isinstance(reader, BytesReader):
                return "pixels", reader.image(indices[row]).size, []
            image = open_image(reader.content(indices[row]))
            with decoding():
                found = (image.format or "?", image.size, _treatment(image))
            to_rgb(image)
            return found
        except (BadImage, OSError) as error:
            return getattr(error, "strerror", None) or str(error)

    for done, (row, found) in enumerate(zip(rows, in_order(open_one, rows.tolist(), workers), strict=True), 1):
        if isinstance(found, str):
            result.problems.append(Problem("unreadable", str(names[row]), found))
        else:
            result.formats[found[0]] += 1
            result.sizes.append(found[1])
            result.treated.update(found[2])
        result.pictures += 1
        if progress is not None:
            progress(done, len(rows))
    return result


def _treatment(image: Image.Image) -> list[str]:
    """What is done to this picture that its owner may want to know."""
    done: list[str] = []
    if is_animated(image):
        done.append("animated: the first frame is used")
    if image.mode.startswith("I"):
        done.append("16-bit: the upper byte is used")
    if image.mode == "CMYK":
        done.append("CMYK: turned into RGB")
    if image.mode == "P":
        done.append("palette: turned into RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        done.append("transparent: laid on white")
    if image.getexif().get(_ORIENTATION, 1) != 1:
        done.append("rotated by EXIF: set upright")
    return done


def contact_sheet(catalogue: Catalogue, path: Path, *, columns: int = 8, rows: int = 24, side: int = 96) -> int:
    """A PNG with a line of example pictures for every class; returns the number of classes on it."""
    labels = catalogue.column("class")
    by_class: dict[str, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        by_class[label or "(no class)"].append(row)
    shown = list(by_class)[:rows]
    text = 150
    sheet = Image.new("RGB", (text + columns * (side + 4) + 4, len(shown) * (side + 4) + 4), "white")
    draw = ImageDraw.Draw(sheet)
    readers, indices = catalogue.table["reader"].to_pylist(), catalogue.table["index"].to_pylist()
    for line, label in enumerate(shown):
        top = 4 + line * (side + 4)
        caption = f"{label[:22]}\n{len(by_class[label])}"
        draw.multiline_text((6, top + 4), caption.encode("latin-1", "replace").decode("latin-1"), fill="black")
        group = by_class[label]
        chosen = [group[int(p)] for p in np.unique(np.linspace(0, len(group) - 1, columns).round())]
        for column, row in enumerate(chosen):
            left = text + column * (side + 4)
            try:
                image = catalogue.readers[readers[row]].image(indices[row])
                with decoding():  # a line of pixels cannot be made to fit
                    sheet.paste(ImageOps.pad(image, (side, side), color="white"), (left, top))
            except (BadImage, OSError):
                draw.rectangle((left, top, left + side, top + side), outline="red", width=2)
                draw.line((left, top, left + side, top + side), fill="red", width=2)
    write_atomic(path, lambda temporary: sheet.save(temporary, "PNG"))
    return len(shown)
