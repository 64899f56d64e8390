"""What a command may do to its own process, and a library never to its caller's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PLUGINS = "pydantic.plugin._loader"


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

    with without_pandas():
        pa.array([])


@contextmanager
def without_pandas() -> Generator[None]:
    """The same for what runs inside, where it may well do without pyarrow: then that is not imported either."""
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        yield
    finally:
        sys.meta_path.remove(absent)


@contextmanager
def short_lived() -> Generator[None]:
    """For a command that answers in a fraction of a second: no search for reference cycles, nor for pydantic's plugins.

    Such a command mostly imports, and what it imports lives as long as it does. The collector looks through all of it
    again and again, and twice more when Python ends: a tenth of the command's time, to find nothing. Whatever has no
    reference left is freed at once, as ever.

    Before its first model pydantic reads the metadata of every package that is installed, for plugins that watch
    validation. As with ``PYDANTIC_DISABLE_PLUGINS=__all__`` there are none here, and nothing is read to know that. A
    pydantic that keeps them elsewhere, or wants more of that module, finds what it looks for.
    """
    collecting = gc.isenabled()
    gc.disable()
    plugins: Any = ModuleType(_PLUGINS)
    plugins.get_plugins = tuple
    plugins.__getattr__ = _of_the_real_one
    sys.modules.setdefault(_PLUGINS, plugins)
    try:
        yield
    finally:
        if sys.modules.get(_PLUGINS) is plugins:
            del sys.modules[_PLUGINS]
        gc.freeze()  # what lives now is not looked at again
        if collecting:
            gc.enable()


def _of_the_real_one(name: str) -> Any:
    """Whatever else of pydantic's own module is asked for."""
    if name.startswith("__"):  # what Python asks of every module
        raise AttributeError(name)
    sys.modules.pop(_PLUGINS, None)
    return getattr(import_module(_PLUGINS), name)


_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt


def keep_freed_memory() -> None:
    """Have freed tensors reused, not handed back to the system and asked for again.

    By default glibc maps every block above some 32 MiB anew, and the system clears its pages again: on a CPU more than
    half of the time of a forward pass over a batch of pictures. Where the C library knows no such setting nothing
    happens.
    """
    import ctypes

    try:
        setting = ctypes.CDLL(None).mallopt
        setting(_MAP, 1 << 30)  # the largest that it takes
        setting(_TRIM, (1 << 31) - 1)
    except (OSError, AttributeError, TypeError):
        return
