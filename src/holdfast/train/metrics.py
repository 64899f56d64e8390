"""metrics.jsonl: one JSON object a line, cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor


def plain(value: Any) -> Any:
    """Tensors become numbers and lists; what is not finite becomes None (JSON has no NaN)."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


class MetricsFile:
    """Append-only; :meth:`size` after a flush to disk is what a checkpoint remembers."""

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, min(keep_bytes, path.stat().st_size))
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        if self._file is not None:
            self._file.write(json.dumps(plain(record), ensure_ascii=False) + "\n")
            self._file.flush()

    def size(self) -> int:
        """Bytes that are safely on disk."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
