"""Keep pandas out of a command that needs none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Absent:
    """A finder by which pandas is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out here", name=name)
        return None


def leave_out_pandas() -> None:
    """Have pyarrow find out now, and without pandas, whether there is a pandas.

    Where it is installed, the first ``pa.array`` of a process imports it, which takes longer than most commands, to
    know one of its series from a list. pyarrow asks once and remembers the answer; it asks again when somebody wants
    pandas from it (``to_pandas``, ``Table.from_pandas``), so that nothing is lost. For the process of a command alone:
    whoever uses holdfast as a library may hand pandas to pyarrow before and after.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(absent)
