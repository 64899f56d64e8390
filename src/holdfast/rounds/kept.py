"""The models that a run chooses among: in folders, or in memory until somebody needs them to outlive the process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from holdfast.model.classifier import Classifier
from holdfast.model.folder import is_model_folder, load_model, model_fingerprint

Write = Callable[[Classifier, Path], str]  # a model into a folder; its fingerprint


class RunModels:
    """Models by the folder that they lie in, or would lie in.

    A study's jobs are short and many, and of the models that a job makes at most one is kept: they stay in memory, on
    the host. :meth:`write` puts them on disk, where a job that goes on later finds them.
    """

    def __init__(self, write: Write, *, in_memory: bool = False) -> None:
        self._write, self._in_memory = write, in_memory
        self._held: dict[Path, Classifier] = {}

    def put(self, model: Classifier, folder: Path) -> None:
        """Keep a model, in place of one that was left there by a run that was killed."""
        if self._in_memory:
            self.remove(folder)
            self._held[folder] = model.frozen_copy().to("cpu")
        else:
            self._write(model, folder)

    def put_named(self, model: Classifier, folder: Path) -> str:
        """Keep a model; its fingerprint, which covers every weight."""
        if not self._in_memory:
            return self._write(model, folder)
        self.put(model, folder)
        return model_fingerprint(self._held[folder])

    def get(self, folder: Path) -> Classifier:
        """A copy of its own, on the CPU."""
        held = self._held.get(folder)
        return load_model(folder) if held is None else held.copy()

    def has(self, folder: Path) -> bool:
        """Whether there is such a model."""
        return folder in self._held or is_model_folder(folder)

    def names(self, parent: Path) -> list[str]:
        """Names of the models in a folder, sorted."""
        on_disk = {path.name for path in parent.iterdir() if is_model_folder(path)} if parent.is_dir() else set[str]()
        return sorted(on_disk | {folder.name for folder in self._held if folder.parent == parent})

    def remove(self, folder: Path) -> None:
        """Forget a model, on disk too."""
        self._held.pop(folder, None)
        if folder.exists():
            shutil.rmtree(folder)

    def write(self, *folders: Path) -> None:
        """Put models on disk that are in memory alone; all of them where none is named."""
        for folder in folders or tuple(self._held):
            held = self._held.get(folder)
            if held is not None and not is_model_folder(folder):
                self._write(held, folder)
