"""The scene study with a trained image tower on a CPU: four minutes a run and core.

    python benchmarks/scenes.py prepare --data DATA --out FOLDER            # once
    python benchmarks/scenes_cpu.py prepare FOLDER                          # once: five minutes, 1.1 GB beside it
    python benchmarks/scenes_cpu.py run FOLDER --study research --out benchmarks/results --runs 0 8

What the frozen lower stages say is kept on disk: of the evaluation view of every picture, and of three random views of
those that are trained on, from which steps choose in turn. The rest is `benchmarks/scenes.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scenes
from benchmarks.machine import commit, machine
from benchmarks.remembered import RowPixels, row_of
from holdfast.data.views import look, random_views
from holdfast.methods.base import Method
from holdfast.model.towers import Preprocess

VIEWS = 3


class KeptTowers(scenes.PackedTowers):
    """Towers whose pictures are row numbers; the lower stages' answers lie in tables."""

    def use(self, clean: np.ndarray, random: np.ndarray, place: np.ndarray) -> None:
        """``clean`` [N, 40, 16, 16]; ``random`` [views, n, 40, 16, 16], where row r is at ``place[r]``."""
        self.tables = [clean, random, place]  # in a list: no part of the state, and shared between copies
        self.step = [0]  # 0: nothing is trained, pictures are seen as they are
        self.preprocess = Preprocess(1, (0.0,) * 3, (1.0,) * 3)

    def lower(self, images: Tensor) -> Tensor:
        clean, random, place = self.tables
        rows, step = row_of(images * 255).numpy(), self.step[0]
        if not step:
            return _maps(clean[rows])
        view = (rows * 7919 + step) % (VIEWS + 1)  # the same for the old model and the new one
        found = np.where((view == VIEWS)[:, None, None, None], clean[rows], random[view % VIEWS, place[rows]])
        return _maps(found)

    def __deepcopy__(self, memo: dict[int, object]) -> KeptTowers:
        kept = {"tables": self.tables, "step": self.step}
        memo.update({id(value): value for value in kept.values()})
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({name: _copied(value, memo) for name, value in self.__dict__.items()})
        return copied


def _copied(value: object, memo: dict[int, object]) -> object:
    import copy

    return copy.deepcopy(value, memo)


def _maps(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).contiguous(memory_format=torch.channels_last)


def prepare(folder: Path) -> None:
    """Maps of every picture, and of random views of those that training sees."""
    torch.set_num_threads(2)
    packed = scenes.load(folder)
    towers = scenes.towers_of(packed)
    view = towers.preprocess
    count = len(packed.pixels)
    trained = np.concatenate([np.flatnonzero(np.isin(packed.roles, ["base", "constraint"])), np.arange(len(packed.ids), count)])
    np.save(folder / "trained.npy", trained)
    shape = (scenes.MAPS, 16, 16)

    def fill(path: Path, rows: np.ndarray, views: int) -> None:
        out = np.lib.format.open_memmap(path, "w+", np.float16, (views, len(rows), *shape) if views else (len(rows), *shape))
        for start in range(0, len(rows), 250):
            images = packed.pixels.read(rows[start : start + 250])
            for which in range(max(views, 1)):
                seen = random_views(len(images), 1000 * start + which, flip=True) if views else None
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    maps = towers.lower(look(images, view.mean, view.std, seen)).float().numpy()
                (out[which] if views else out)[start : start + len(images)] = maps
        out.flush()

    began = time.perf_counter()
    fill(folder / "clean.npy", np.arange(count), 0)
    fill(folder / "random.npy", trained, VIEWS)
    print(f"{count} pictures in {time.perf_counter() - began:.0f} s")


@contextmanager
def kept(folder: Path, packed: scenes.Packed) -> Iterator[scenes.Packed]:
    """`benchmarks/scenes.py` over kept maps; each step of a method sees the next view of its pictures."""
    clean, random = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("clean", "random"))
    trained = np.load(folder / "trained.npy")
    place = np.zeros(len(packed.pixels), dtype=np.int64)
    place[trained] = np.arange(len(trained))
    plain, call = scenes.PackedTowers, Method.__call__

    class Towers(KeptTowers):
        def __init__(self, texts: list[str], table: Tensor) -> None:
            super().__init__(texts, table)
            self.use(clean, random, place)

    def stepped(method: Method, *given: object) -> object:
        step = method.model.towers.step
        step[0] = method.steps_taken = getattr(method, "steps_taken", 0) + 1
        try:
            return call(method, *given)
        finally:
            step[0] = 0

    scenes.PackedTowers, Method.__call__ = Towers, stepped
    try:
        yield replace(packed, pixels=RowPixels(len(packed.pixels)))
    finally:
        scenes.PackedTowers, Method.__call__ = plain, call


def run(folder: Path, study: str, out: Path, runs: tuple[int, int | None], cores: int) -> None:
    torch.set_num_threads(cores)
    began = time.perf_counter()
    jobs = scenes.studies(study, {key: tried[0] for key, tried in scenes.SETTINGS.items()})[slice(*runs)]
    print(f"{len(jobs)} runs", flush=True)
    path = out / f"scenes-{study}-cpu-{runs[0]}.json"
    judges = ("dev", "spare") if study == "research" else ("dev", "test", "sealed")
    results = []
    with kept(folder, scenes.load(folder)) as packed:
        scenes._begin("cpu", str(folder))
        scenes._STATE["packed"] = packed
        for without in scenes._missing(jobs, folder):
            scenes._make_base(without)
            print(f"base without {without} after {time.perf_counter() - began:.0f} s", flush=True)
        torch.set_num_threads(cores)
        for job in jobs:
            results.append(scenes._work((replace(job, train={**job.train, "graphs": False, "precision": "float32"}), judges)))
            print(job.name, job.target, job.size, job.seed, results[-1].get("error", results[-1].get("seconds")), flush=True)
            head = {**machine(), "commit": commit()}
            path.write_text(json.dumps({**head, "runs": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--study", default="research")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--runs", type=int, nargs=2, default=(0, None))
    parser.add_argument("--cores", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.folder)
    else:
        run(arguments.folder, arguments.study, arguments.out, tuple(arguments.runs), arguments.cores)


if __name__ == "__main__":
    main()
