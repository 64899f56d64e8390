"""Shared by all tests: few threads, no network, and the real pictures where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tests run side by side: one thread each, or they fight over the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test spends sealed sets of the person who runs it, or of another test, or reads what that person cached."""
    own = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("HOLDFAST_LEDGER", str(own / "ledger"))
    monkeypatch.setenv("HOLDFAST_CACHE", str(own / "cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real pictures are skipped where those are not."""
    if not SHARED.is_dir():
        skip = pytest.mark.skip(reason=f"the real pictures are not here ({SHARED})")
        for item in items:
            if "shared_data" in item.keywords:
                item.add_marker(skip)
    if os.environ.get("HOLDFAST_ONLY_TRIED"):  # tools/reliability.py
        items[:] = [item for item in items if "tried" in getattr(item, "fixturenames", ())]


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``tried("signals", 12)``: what a test did how often; ``tools/reliability.py`` adds it all up."""

    def note(kind: str, count: int = 1) -> None:
        record_property("tried", [kind, count])

    return note
