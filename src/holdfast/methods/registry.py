"""Which methods there are: ``method.name`` -> class and settings. Nothing here imports torch.

A name is looked up among the built-in methods, then among the entry points of the group ``holdfast.methods``; a name
that ends in ``.py`` is a Python file. Only the module that is asked for is imported.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.config.method import MethodConfig, Registration, relative_name, split_file
from holdfast.errors import UserError, nearest
from holdfast.files import read_regular

if TYPE_CHECKING:
    from holdfast.methods.base import Method
    from holdfast.model.classifier import Classifier

BUILT_IN = {
    "holdfast": "holdfast.methods.holdfast",
    "refit": "holdfast.methods.refit",
    "last_layer": "holdfast.methods.last_layer",
    "finetune": "holdfast.methods.finetune",
    "cross_entropy": "holdfast.methods.cross_entropy",
    "flyp": "holdfast.methods.flyp",
    "wccl": "holdfast.methods.wccl",
    "gem": "holdfast.methods.gem",
    "co2l": "holdfast.methods.co2l",
    "der": "holdfast.methods.der",
    "rm": "holdfast.methods.rm",
}
GROUP = "holdfast.methods"
_NAME = re.compile(r"[A-Za-z_][\w.+-]*")
_MAX_SOURCE = 8 << 20  # bytes of a Python file
_MOST_SHOWN = 200  # characters of a name or of somebody else's error
_HOW = '@register("NAME", settings=SETTINGS) on a class that derives from holdfast.Method'


@dataclass(frozen=True)
class Registered:
    """A method: its name, its class and the class of its settings."""

    name: str
    method: type[Any]  # called with (model, settings, steps)
    settings: type[MethodConfig]


MethodClass = TypeVar("MethodClass", bound=type[Any])
_by_module: dict[str, dict[str, Registered]] = defaultdict(dict)
_by_settings: dict[type[MethodConfig], Registered] = {}
_files: dict[tuple[Path, str], dict[str, Registered]] = {}  # by path and content: what a file registered


def register(name: str, *, settings: type[MethodConfig]) -> Callable[[MethodClass], MethodClass]:
    """Make a :class:`~holdfast.methods.base.Method` known under a name, with the class of its settings.

    ::

        @register("lwf", settings=LwfConfig)
        class Lwf(Method): ...
    """

    def decorate(method: MethodClass) -> MethodClass:
        _check(name, method, settings)
        registered = Registered(name, method, settings)
        settings.registration = Registration(name)
        _by_module[method.__module__][name] = _by_settings[settings] = registered
        return method

    return decorate


def _check(name: Any, method: Any, settings: Any) -> None:
    from holdfast.methods.base import Method

    if not isinstance(name, str) or not _NAME.fullmatch(name) or split_file(name):
        raise UserError(f"{_shown(repr(name))} is no name for a method", expected='a short word such as "lwf"')
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"the method {name!r} is no Method", expected=_HOW, found=_shown(repr(method)))
    if not (isinstance(settings, type) and issubclass(settings, MethodConfig)) or settings is MethodConfig:
        raise UserError(
            f"the settings of the method {name!r} are no settings class",
            expected="a class that derives from holdfast.config.MethodConfig",
            found=_shown(repr(settings)),
        )
    known = _by_settings.get(settings)
    if known is not None:
        raise UserError(
            f"{settings.__name__} are the settings of two methods, {known.name!r} and {name!r}",
            do="give each method a settings class of its own; it may derive from the other",
        )
    if name in _by_module[method.__module__] and method.__module__ != "__main__":  # a notebook's cell is run again
        raise UserError(f"two methods of one file are called {name!r}", do="give one of them another name")


def build_method(model: Classifier, config: MethodConfig, steps: int) -> Method:
    """The method that the settings belong to, over a model that will be trained."""
    known = _by_settings.get(type(config))
    if known is None:
        raise UserError(f"{type(config).__name__} are the settings of no method", expected=_HOW)
    return known.method(model, config, steps)


# -- looking up -------------------------------------------------------------------------------------------------------


def read_settings(values: Mapping[str, Any], root: Path) -> MethodConfig:
    """[method] as the settings of the method that ``name`` names; a file is looked for from ``root``."""
    registered = find(str(values["name"]), root, values.get("sha256"))
    return registered.settings.model_validate({**values, "name": relative_name(str(values["name"]), root)})


def find(name: str, root: Path = Path(), sha256: Any = None) -> Registered:
    """The method of a name. Where ``sha256`` is given, its source must be what it was when that was written down."""
    file = split_file(name)
    if file is not None:
        return _in_file(file[0], root, file[1], sha256)
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
        return _by_module[BUILT_IN[name]][name]
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if entries:
        return _in_package(entries, name, sha256)
    raise UserError(
        f"there is no method {_shown(name)!r}",
        expected="a method's name, or a Python file such as my_method.py",
        do=nearest(_shown(name), known_names()),
    )


def known_names() -> list[str]:
    """Names of the built-in methods and of those that installed packages bring."""
    return [*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))]


def short_name(name: str) -> str:
    """How tables call a method: of a file its stem, or the name behind the colon."""
    file = split_file(name)
    return name if file is None else file[1] or file[0].stem


# -- installed packages -----------------------------------------------------------------------------------------------


def _in_package(entries: list[EntryPoint], name: str, sha256: Any) -> Registered:
    if len({entry.value for entry in entries}) > 1:
        found = ", ".join(f"{entry.dist.name if entry.dist else '?'} ({entry.value})" for entry in entries)
        raise UserError(f"several installed packages have a method {name!r}", found=found, do="uninstall all but one")
    entry = entries[0]
    try:
        loaded = entry.load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the method {name!r} cannot be imported from {entry.value}", found=_shown(_error_text(error))
        ) from error
    module = loaded if isinstance(loaded, ModuleType) else sys.modules[loaded.__module__]
    registered = _by_module.get(module.__name__, {}).get(name)
    if registered is None:
        raise UserError(f"{entry.value} registers no method {name!r}", expected=_HOW)
    known = registered.settings.registration
    if module.__file__ is not None and not (known and known.sha256):  # as it is when it is imported
        known = Registration(name, hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest())
        registered.settings.registration = known
    _check_unchanged(entry.value, known.sha256 if known else "", sha256)
    return registered


# -- files ------------------------------------------------------------------------------------------------------------


def _in_file(given: Path, root: Path, name: str, sha256: Any) -> Registered:
    methods = _loaded(given, root, sha256)
    if not methods:
        raise UserError(f"{given} registers no method", expected=_HOW)
    if name:
        if name not in methods:
            raise UserError(f"{given} registers no method {_shown(name)!r}", do=nearest(_shown(name), methods))
        return methods[name]
    if len(methods) > 1:
        first = next(iter(methods))
        raise UserError(
            f"{given} registers {len(methods)} methods",
            found=", ".join(methods),
            do=f'say which: name = "{given.as_posix()}:{first}"',
        )
    return next(iter(methods.values()))


def _loaded(given: Path, root: Path, sha256: Any) -> dict[str, Registered]:
    """The methods of a file, executed once for each of its contents."""
    try:
        path = Path(os.path.realpath(root / given))
        source = read_regular(path, _MAX_SOURCE)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no file {_shown(str(given))}",
            expected="a Python file that registers a method",
            do="check the path" if given.is_absolute() else f"check the path: it begins in {root.resolve()}",
        ) from error
    except (OSError, ValueError) as error:  # a folder, a pipe, a name with a null byte
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"{_shown(str(given))} cannot be read", found=found) from error
    fingerprint = hashlib.sha256(source).hexdigest()
    _check_unchanged(str(given), fingerprint, sha256)
    if (path, fingerprint) not in _files:
        methods = _execute(path, given, source)
        for registered in methods.values():
            registered.settings.registration = Registration(registered.name, fingerprint, path)
            copyreg.pickle(registered.settings, _reduced)  # type: ignore[arg-type]
        _files[path, fingerprint] = methods
    return _files[path, fingerprint]


def _check_unchanged(where: str, found: str, expected: Any) -> None:
    if expected is not None and expected != found:
        raise UserError(
            f"the method in {where} was changed since this run began",
            expected=f"sha256 {_shown(str(expected))}",
            found=f"sha256 {found}",
            do="put it back as it was, or start a new run with --out",
        )


def _execute(path: Path, given: Path, source: bytes) -> dict[str, Registered]:
    """Run a file as a module of its own; whatever goes wrong in it is told in a sentence, with its line."""
    digest = hashlib.sha256(str(path).encode() + source).hexdigest()
    module = ModuleType(f"holdfast_method_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look their annotations up there
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[module.__name__]
        _by_module.pop(module.__name__, None)
        if not isinstance(error, Exception | SystemExit):
            raise
        where = f"{given}, line {_line(error, path)}"
        if isinstance(error, UserError):
            raise UserError(
                f"{where}: {error.message}", expected=error.expected, found=error.found, do=error.do
            ) from error
        raise UserError(
            f"{where}: the file cannot be imported",
            found=_shown(_error_text(error)),
            do=f"repair it; `python {given}` shows the traceback",
        ) from error
    return dict(_by_module.get(module.__name__, {}))


def _line(error: BaseException, path: Path) -> int:
    """The last line of the file that had a part in an error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return (lines[-1] if lines else None) or 1


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _reduced(settings: MethodConfig) -> tuple[Any, tuple[Any, ...]]:
    """How settings from a file travel to another process, which has not executed that file."""
    known = settings.registration
    assert known is not None
    return _restored, (known, settings.model_dump(exclude_unset=True))


def _restored(known: Registration, values: dict[str, Any]) -> MethodConfig:
    assert known.file is not None
    return _in_file(known.file, Path(), known.name, known.sha256).settings.model_validate(values)
