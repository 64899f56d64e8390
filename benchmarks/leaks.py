"""Near copies: how many are found, how many are wrong, and what a million pictures cost.

    python benchmarks/leaks.py [--sizes 10000 30000 100000 300000 1000000] [--planted 500]

Recall and precision are measured on real photographs (../shared/data), changed in every way the search promises to see
through. For the cost there are not enough of them, so random windows of theirs stand in for photographs. Times are of
one core, as the processor counts them, for others may use the machine; the time on the clock stands beside them.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import resource
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from threadpoolctl import threadpool_limits

from holdfast.data.dedup.leaks import CORRELATION, DISTANCE, near_duplicates
from holdfast.data.dedup.signatures import SIDE, Signatures, make_signatures, thumbnail
from holdfast.files import write_json

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
RESULT = Path(__file__).parent / "results" / "leaks.json"
MIRROR = Image.Transpose.FLIP_LEFT_RIGHT


def photographs(name: str, step: int = 1) -> list[Image.Image]:
    with zipfile.ZipFile(SHARED / name) as archive:
        names = sorted(item for item in archive.namelist() if item.endswith(".jpg"))[::step]
        return [Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in names]


def again(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")


def cut(image: Image.Image, sides: tuple[float, float, float, float]) -> Image.Image:
    width, height = image.size
    left, top, right, bottom = sides
    return image.crop(
        (round(width * left), round(height * top), round(width * (1 - right)), round(height * (1 - bottom)))
    )


def changes(generator: np.random.Generator) -> dict[str, Callable[[Image.Image], Image.Image]]:
    def random_cut(image: Image.Image) -> Image.Image:
        return cut(image, tuple(generator.uniform(0, 0.05, 4)))  # type: ignore[arg-type]

    return {
        "encoded again, quality 60": lambda image: again(image, 60),
        "encoded again, quality 30": lambda image: again(image, 30),
        "mirrored": lambda image: image.transpose(MIRROR),
        "two thirds of the size": lambda image: image.resize((image.width * 2 // 3, image.height * 2 // 3)),
        "5 % off every side, quality 85": lambda image: again(cut(image, (0.05, 0.05, 0.05, 0.05)), 85),
        "5 % off one side, quality 85": lambda image: again(cut(image, (0.05, 0, 0, 0)), 85),
        "5 % off two sides, quality 85": lambda image: again(cut(image, (0.05, 0.05, 0, 0)), 85),
        "0 to 5 % off each side, quality 70": lambda image: again(random_cut(image), 70),
        "mirrored, 5 % off every side, quality 60": lambda image: again(
            cut(image, (0.05, 0.05, 0.05, 0.05)).transpose(MIRROR), 60
        ),
        "brighter by a fifth": lambda image: image.point(lambda value: min(255, int(value * 1.2))),
    }


def signed(images: list[Image.Image]) -> Signatures:
    return make_signatures(np.stack([thumbnail(image) for image in images]))


def recall(sets: dict[str, list[Image.Image]], planted: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    result: dict[str, Any] = {}
    for name, images in sets.items():
        originals = signed(images)
        rows = generator.choice(len(images), planted, replace=False)
        own = len(near_duplicates(originals))
        found: dict[str, float] = {}
        for change, function in changes(generator).items():
            matches = near_duplicates(originals, signed([function(images[row]) for row in rows]))
            hits = {(match.a, match.b) for match in matches} & {(int(row), n) for n, row in enumerate(rows)}
            found[change] = len(hits) / planted
        result[name] = {"pictures": len(images), "planted_each": planted, "found": found, "pairs_of_its_own": own}
        print(name, result[name])
    return result


def windows(images: list[Image.Image], count: int) -> np.ndarray:
    """Thumbnails of random windows, 45 to 75 % of a side, half of them mirrored."""
    generator = np.random.default_rng(1)
    thumbs = np.empty((count, SIDE, SIDE), dtype=np.uint8)
    greys = [image.convert("L") for image in images]
    for row in range(count):
        image = greys[row % len(greys)]
        width, height = (float(generator.uniform(0.45, 0.75)) * side for side in image.size)
        left, top = generator.uniform(0, image.width - width), generator.uniform(0, image.height - height)
        box = (left, top, left + width, top + height)
        thumbs[row] = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))
        if generator.random() < 0.5:
            thumbs[row] = thumbs[row, :, ::-1]
    return thumbs


def cost(thumbs: np.ndarray) -> dict[str, Any]:
    begun, clock = time.process_time(), time.perf_counter()
    signatures = make_signatures(thumbs)
    hashed = time.process_time()
    matches = near_duplicates(signatures)
    return {
        "pictures": len(thumbs),
        "hash_seconds": hashed - begun,
        "compare_seconds": time.process_time() - hashed,
        "clock_seconds": time.perf_counter() - clock,
        "pairs": len(matches),
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def all_pairs_seconds(hashes: np.ndarray) -> float:
    """What comparing every pair would cost: 32 versions of each against all, timed on some and scaled."""
    rows = 200
    begun = time.process_time()
    for row in range(rows):
        np.bitwise_count(hashes ^ hashes[row]).min()
    return (time.process_time() - begun) / rows * len(hashes) * 32


def thumbnails_a_second(images: list[Image.Image]) -> float:
    encoded = []
    for image in images[:200]:
        buffer = io.BytesIO()
        image.resize((500, 375)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    begun = time.process_time()
    for content in encoded:
        image = Image.open(io.BytesIO(content))
        image.draft("RGB", (4 * SIDE, 4 * SIDE))
        thumbnail(image.convert("RGB"))
    return len(encoded) / (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 30_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--planted", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    sets = {
        "scenes, 64 px": photographs("intel-scene-64.zip"),
        "web photographs, 96 px": photographs("flickr8k-96.zip"),
    }
    found = recall(sets, arguments.planted)
    pool = [image for images in sets.values() for image in images] + photographs("tiny-imagenet-200-64.zip")
    np.random.default_rng(2).shuffle(pool)  # type: ignore[arg-type]
    costs: list[dict[str, Any]] = []
    for size in arguments.sizes:
        thumbs = windows(pool, size)
        costs.append(cost(thumbs) | {"all_pairs_seconds": all_pairs_seconds(make_signatures(thumbs).hashes)})
        print(costs[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    logs = np.log([[cost["pictures"], cost["compare_seconds"]] for cost in costs])
    write_json(
        arguments.out,
        {
            "what": "near copies: share found, and seconds to compare, one core",
            "distance": DISTANCE,
            "correlation": CORRELATION,
            "recall": found,
            "cost": costs,
            "growth_exponent": float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]) if len(costs) > 1 else None,
            "thumbnails_a_second_500x375_jpeg": thumbnails_a_second(next(iter(sets.values()))),
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "load_average": os.getloadavg()[0],
            "commit": commit.stdout.strip(),
        },
    )


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
