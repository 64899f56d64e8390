"""What a results file says of where its figures come from."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, GPU and versions."""
    found: dict[str, Any] = {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


def commit() -> str:
    """The commit the figures were made with; ``HOLDFAST_COMMIT`` where the code was copied without its history."""
    found = os.environ.get("HOLDFAST_COMMIT")
    if found:
        return found
    try:
        name = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    changed = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=False)
    return f"{name}-changed" if changed.stdout.strip() else name
