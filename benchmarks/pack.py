"""The packed store: pictures a second from the page cache against decoding JPEG files, memory, time to open.

    python benchmarks/pack.py [--folder FOLDER] [--sizes 1000 3000 10000 30000 100000]

Pictures are real photographs (../shared/data), enlarged to 320 x 240 px and encoded at quality 90: the size that most
data sets for 224 px have. One thousand are packed; larger stores repeat their rows, for reading does not care what is
on a picture. Each size runs in a fresh process, in which rounds of the contestants alternate; the median counts.
Beside pictures a second on the clock stand those a second of processor time, for others may use the machine. A store of
100,000 takes 15 GB under FOLDER, which is deleted in the end.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from holdfast.config import SourceConfig
from holdfast.data.images import evaluation_view, open_image, to_rgb
from holdfast.data.pack import pack
from holdfast.data.sources.store import BLOCK, PackedPixels, open_store
from holdfast.files import fingerprint_bytes, write_json

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
RESULT = Path(__file__).parent / "results" / "pack.json"
SIZE, BATCH, PICTURES = 224, 256, 1000


def make_pictures(folder: Path) -> None:
    with zipfile.ZipFile(SHARED / "flickr8k-96.zip") as archive:
        names = sorted(item for item in archive.namelist() if item.endswith(".jpg"))[:PICTURES]
        for number, name in enumerate(names):
            image = (
                Image.open(io.BytesIO(archive.read(name))).convert("RGB").resize((320, 240), Image.Resampling.BICUBIC)
            )
            target = folder / "class" / f"{number:05d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            image.save(target, "JPEG", quality=90)


def repeat_store(original: Path, out: Path, count: int) -> None:
    """A store with the rows of another one again and again, until there are ``count``."""
    out.mkdir()
    header = json.loads((original / "store.json").read_text())
    for name in ("pixels.bin", "thumbs.bin"):
        content = (original / name).read_bytes()
        row = len(content) // header["rows"]
        with (out / name).open("wb") as file:
            for start in range(0, count, header["rows"]):
                file.write(content[: min(header["rows"], count - start) * row])
    index = open_store(original).index
    table = pa.concat_tables([index] * -(-count // len(index))).slice(0, count)
    table = table.set_column(0, index.schema.field("row"), pa.array(np.arange(count)))
    ids = [f"{position:064x}" for position in range(count)]
    table = table.set_column(1, index.schema.field("example_id"), pa.array(ids)).combine_chunks()
    with pa.OSFile(str(out / "index.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    digests = [fingerprint_bytes(b"")] * -(-count // BLOCK)
    write_json(out / "store.json", header | {"rows": count, "examples": count, "blocks": digests})


def memory(key: str) -> float:
    """MiB of this process: ``VmRSS`` all of it, ``RssAnon`` without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def read_batches(pixels: PackedPixels, generator: np.random.Generator, seconds: float) -> dict[str, float]:
    """Random batches over the whole store."""
    done = 0
    begun, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        pixels.read(generator.choice(len(pixels), BATCH, replace=False))
        done += BATCH
    return rates(done, begun, processor)


def decode_files(contents: list[bytes], seconds: float, whole_view: bool) -> dict[str, float]:
    """Decoding pictures with Pillow from memory; with resizing and cropping where asked."""
    done = 0
    begun, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        image = to_rgb(open_image(contents[done % len(contents)]))
        if whole_view:
            evaluation_view(image, SIZE)
        done += 1
    return rates(done, begun, processor)


def rates(done: int, begun: float, processor: float) -> dict[str, float]:
    return {
        "a_second": done / (time.perf_counter() - begun),
        "a_second_of_processor": done / (time.process_time() - processor),
    }


def compare(path: Path, pictures: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """One store against decoding, in this process; the store is read once before, so that it lies in the page cache."""
    begun = time.perf_counter()
    store = open_store(path)
    pixels, _ = store.pixels, store.index
    opened = time.perf_counter() - begun
    contents = [file.read_bytes() for file in sorted(pictures.rglob("*.jpg"))]
    pixels.read(np.arange(BATCH))
    before = memory("VmRSS")
    for start in range(0, len(pixels), BATCH):
        pixels.read(np.arange(start, min(start + BATCH, len(pixels))))
    generator = np.random.default_rng(0)
    found: dict[str, list[dict[str, float]]] = {"store": [], "decode": [], "decode_resize_crop": []}
    for _ in range(rounds):
        found["store"].append(read_batches(pixels, generator, seconds))
        found["decode"].append(decode_files(contents, seconds, whole_view=False))
        found["decode_resize_crop"].append(decode_files(contents, seconds, whole_view=True))
    result: dict[str, Any] = {name: medians(item) for name, item in found.items()}
    for key in ("a_second", "a_second_of_processor"):
        result[f"times_decoding_{key}"] = result["store"][key] / result["decode"][key]
    grown, resident = memory("VmRSS") - before, resident_share(path / "pixels.bin")
    result |= {"open_seconds": opened, "memory_mib": memory("VmRSS"), "memory_growth_mib": grown}
    return result | {"share_in_page_cache": resident}


def resident_share(path: Path) -> float | None:
    """Share of a file that lies in the page cache, as util-linux tells; None where it is not installed."""
    if shutil.which("fincore") is None:
        return None
    reported = subprocess.run(["fincore", "-nb", "-o", "RES", str(path)], capture_output=True, text=True, check=True)
    return int(reported.stdout) / path.stat().st_size


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(item[key] for item in rounds) for key in rounds[0]}


def page_cache_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def run(folder: Path, sizes: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    make_pictures(folder / "pictures")
    packing: dict[str, float] = {}
    for workers in (1, 2):
        begun = time.perf_counter()
        pack(SourceConfig(path=folder / "pictures"), folder / f"packed{workers}", size=SIZE, workers=workers)
        packing[f"{workers} threads"] = PICTURES / (time.perf_counter() - begun)
    stores: dict[str, Any] = {}
    for size in sizes:
        store = folder / f"store{size}"
        repeat_store(folder / "packed1", store, size)
        command = [sys.executable, __file__, "--compare", str(store), str(folder / "pictures")]
        command += ["--rounds", str(rounds), "--seconds", str(seconds)]
        stores[str(size)] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        stores[str(size)]["load_average"] = os.getloadavg()[0]
        print(size, stores[str(size)], flush=True)
        shutil.rmtree(store)
    return {"stores": stores, "packing_a_second": packing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 3000, 10_000, 30_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("STORE", "PICTURES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare is not None:
        print(json.dumps(compare(*arguments.compare, arguments.rounds, arguments.seconds)))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    available = page_cache_gib()
    try:
        result = run(folder, arguments.sizes, arguments.rounds, arguments.seconds)
    finally:
        shutil.rmtree(folder)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    write_json(
        arguments.out,
        {
            "what": f"pictures of {SIZE} px a second, random batches of {BATCH}, one reading process",
            **result,
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "memory_available_gib": available,
            "commit": commit.stdout.strip(),
        },
    )


if __name__ == "__main__":
    main()
