"""A round developed with retrieved data and without, Flickr8k's captions standing in for the web.

    python benchmarks/retrieve_round.py --folder FOLDER [--steps 200] [--seeds 0 1 2]

Flickr8k (../shared/data) becomes metadata in LAION's layout whose links point at a local HTTP server; `holdfast
retrieve all` searches it for the sea, judges with the sentence encoder, fetches, and cleans against every picture of
the labelled source, the Intel scenes. The old model is a two-tower model put together from parts that has seen five of
the six scenes and a handful of the target. FOLDER keeps the runs; a step that is there is not made again.
"""

from __future__ import annotations

import argparse
import csv
import functools
import http.server
import io
import json
import os
import platform
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
RESULT = Path(__file__).parent / "results" / "retrieve_round.json"
TARGET, SYNONYMS, OWN = "sea", "ocean,beach", 20

COMMON = """
[data]
{pairs}
target_images = {own}
constraint_images = 200

[data.source]
kind = "folder"
path = "scenes"

[data.roles]
dev = 150
sealed = 0
test = 0

[train]
steps = {steps}
batch = 64
learning_rate = {rate}
checkpoint_every = {steps}

[evaluate]
every = {every}
"""


def holdfast(*words: object, allowed: tuple[int, ...] = (0,)) -> str:
    """Run the command line; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in allowed:
        raise SystemExit(f"holdfast {words[0]} ended with {done.returncode}")
    return done.stdout


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that does not log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def unpack(folder: Path) -> None:
    """Pictures as files, Flickr8k's captions as links and texts."""
    for name, where in (("flickr8k-96.zip", "flickr"), ("intel-scene-64.zip", "scenes")):
        if not (folder / where).exists():
            with zipfile.ZipFile(SHARED / name) as archive:
                archive.extractall(folder / where)


def write_metadata(folder: Path, port: int) -> Path:
    """Captions in LAION's layout. One caption a picture: each link is fetched once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with zipfile.ZipFile(SHARED / "flickr8k-96.zip") as archive, archive.open("captions.csv") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8")))
    table = {
        "URL": [f"http://127.0.0.1:{port}/{row['filepath']}" for row in rows],
        "TEXT": [row["title"] for row in rows],
    }
    path = folder / "flickr.parquet"
    pq.write_table(pa.table(table), path)
    return path


def retrieve(folder: Path) -> dict[str, Any]:
    """The four steps against a local server."""
    handler = functools.partial(Quiet, directory=str(folder / "flickr"))
    # A fixed port: links, and with them the manifest, are then the same in every run.
    with http.server.ThreadingHTTPServer(("127.0.0.1", 18_473), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = write_metadata(folder, server.server_port)
        words = ("--about", TARGET, "--also", SYNONYMS, "--out", folder / "retrieved", "--allow-private")
        text = holdfast(
            "retrieve", "all", source, *words, "--per-host", 32, "--against", folder / "scenes", "--json", "--quiet"
        )
        server.shutdown()
    return json.loads(text)


def tune(folder: Path, steps: int) -> Path:
    """The old model: five scenes, and a handful of pictures of the target."""
    run = folder / "base"
    if not (run / "model").exists():
        head = f'objective = "cross_entropy"\nat_most = {{ {TARGET} = {OWN} }}\n'
        model = '\n[model]\narchitecture = "parts-64"\nfreeze = "text"\n'
        body = COMMON.format(pairs="", own=OWN, steps=steps, rate=1e-3, every=steps)
        body = body.replace(f"target_images = {OWN}\nconstraint_images = 200\n", "")
        (folder / "base.toml").write_text(head + body + model)
        holdfast("tune", folder / "base.toml", "--out", run, "--quiet")
    return run / "model"


def develop(folder: Path, name: str, pairs: str, steps: int, seed: int) -> dict[str, Any]:
    """One round; its scores."""
    run, result = folder / f"{name}-{seed}", folder / f"{name}-{seed}.json"
    if not result.exists():
        head = f'seed = {seed}\n[task]\ntarget = "{TARGET}"\n'
        model = '\n[model]\nstart = "base/model"\nfreeze = "text"\n'
        body = COMMON.format(pairs=pairs, own=OWN, steps=steps, rate=1e-4, every=max(1, steps // 4))
        (folder / f"{name}.toml").write_text(head + body + model)
        text = holdfast("develop", folder / f"{name}.toml", "--out", run, "--json", "--quiet", allowed=(0, 4))
        result.write_text(text)
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    unpack(folder)
    counts = retrieve(folder)
    print(json.dumps(counts), flush=True)
    tune(folder, given.tune_steps)
    with_data = (
        'pairs = [{ kind = "csv", path = "retrieved/clean/target.csv" }]\n'
        'negatives = { kind = "csv", path = "retrieved/clean/negatives.csv" }'
    )
    rounds: dict[str, list[Any]] = {"without": [], "with": []}
    for seed in given.seeds:
        for name, pairs in (("without", ""), ("with", with_data)):
            rounds[name].append({"seed": seed, **develop(folder, name, pairs, given.steps, seed)})
            print(name, seed, json.dumps(rounds[name][-1])[:600], flush=True)
    for item in (*rounds["without"], *rounds["with"]):
        item.pop("run", None)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "command": f"benchmarks/retrieve_round.py --steps {given.steps} --tune-steps {given.tune_steps} "
        f"--seeds {' '.join(map(str, given.seeds))}",
        "commit": commit,
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine()},
        "target": TARGET,
        "own_target_images": OWN,
        "retrieved": counts,
        "rounds": rounds,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
