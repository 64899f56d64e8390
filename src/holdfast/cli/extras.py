"""What a light installation leaves out, and the extra that brings it: one place for every command."""

from __future__ import annotations

from collections.abc import Sequence

# Package -> what people call it, and the extra of pyproject.toml that installs it.
EXTRAS = {
    "torch": ("PyTorch", "train"),
    "torchvision": ("torchvision", "train"),
    "open_clip": ("OpenCLIP", "train"),
    "safetensors": ("safetensors", "train"),
    "sklearn": ("scikit-learn", "train"),
    "matplotlib": ("Matplotlib", "train"),
    "transformers": ("transformers", "import"),
    "timm": ("timm", "import"),
    "duckdb": ("DuckDB", "retrieve"),
    "aiohttp": ("aiohttp", "retrieve"),
}


def missing_extra(error: ModuleNotFoundError, arguments: Sequence[str]) -> str | None:
    """One sentence that names the command, what it needs and how to get it; None for a package that no extra brings."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    name, extra = EXTRAS[package]
    words = ("holdfast", *(word for word in arguments[:1] if not word.startswith("-")))
    return f"{' '.join(words)} needs {name}; do: pip install 'holdfast[{extra}]'"
