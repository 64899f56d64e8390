"""[method]: the base of every method's settings, and what the rest of a round asks of them.

The settings of a method lie in its own file, beside its class (:mod:`holdfast.methods.registry`). What a round needs to
know of a method is asked of these settings: no other module names one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from holdfast.config.base import Config, MovingAverage, PositiveFloat

if TYPE_CHECKING:
    from holdfast.config.round import CandidatesConfig, TrainConfig

Views = Literal["clean", "paired", "mismatched"]
_FILE = re.compile(r"(?P<path>.*[^/\\]\.py)(?::(?P<method>[^:/\\]+))?", re.DOTALL)


@dataclass(frozen=True)
class Registration:
    """Which method settings belong to. Of one from outside the package also the fingerprint of its source."""

    name: str
    sha256: str = ""
    file: Path | None = None  # where it was read from by its path; None: it can be imported


class MethodConfig(Config):
    """[method]: base of the settings of a method. ``name`` is what ROUND.toml calls it: a name, or a Python file."""

    registration: ClassVar[Registration | None] = None  # set by `register`

    name: str = ""
    """The method: a name, or a Python file (`my_method.py`, or `my_method.py:NAME` where it holds several)."""

    # -- what a round asks; a method overrides what differs ----------------------------------------------------------

    def trains(self) -> bool:
        """Whether the method makes steps; one that does not hands its candidates over at once."""
        return True

    def fits_last_layer(self) -> bool:
        """Whether fits of the last layer (`candidates.last_layer`) are part of the method."""
        return False

    def protected_views(self) -> Views:
        """Views of constraint images: the evaluation view, a random one, or random for the new model alone."""
        return "clean"

    def two_views(self) -> bool:
        """Whether a step sees target and constraint images through two random views each, where views are random."""
        return False

    def head_learning_rate(self, learning_rate: float) -> float | None:
        """Learning rate of the task-dependent heads, given that of the rest; None for the same."""
        return None

    def check_training(self, train: TrainConfig) -> None:
        """Raise a ValueError where [train] contradicts the method."""

    def section_defaults(self, train: TrainConfig) -> dict[str, dict[str, Any]]:
        """Section -> values of its keys where the round gives none: what is part of the method and stands in [train]
        or [candidates]."""
        return {}

    def check_candidates(self, candidates: CandidatesConfig) -> None:
        """Raise a ValueError where [candidates] contradicts the method."""

    def kkt_penalty(self) -> float | None:
        """beta of the penalty that holds protected tasks, for `holdfast diagnose`; None where there is none."""
        return None

    def retention_scale(self, class_temperature: float) -> float:
        """What the gradient of the protected tasks' term is multiplied by, besides beta or alpha."""
        return 1.0

    def contrastive_temperature(self) -> float | None:
        """tau of the target's contrastive objective, for `holdfast diagnose`; None where there is none."""
        return None

    # -- the name, and the file behind it ----------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if cls.registration is None or not isinstance(values, dict):
            return values
        values = {"name": cls.registration.name, **values}
        if cls.registration.sha256 and values.get("sha256") == cls.registration.sha256:
            del values["sha256"]  # no setting: it says which code the settings were written for
        return values

    @model_validator(mode="after")
    def _own_name(self) -> Self:
        known = self.registration
        if known is not None and known.file is None and self.name != known.name:
            raise ValueError(f"{type(self).__name__} are the settings of {known.name!r}, not of {self.name!r}")
        return self

    @model_serializer(mode="wrap")
    def _with_sha256(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written into a run folder says which code it was run with: other code is refused when it resumes."""
        values = handler(self)
        if self.registration is not None and self.registration.sha256:
            values["sha256"] = self.registration.sha256
        return values

    def rebased(self, moved: Callable[[Path], Path]) -> Self:
        """The same settings where relative paths begin in another folder."""
        file = split_file(self.name)
        return self if file is None else self.model_copy(update={"name": joined_name(moved(file[0]), file[1])})


class ContrastConfig(MethodConfig):
    """Settings of the global contrastive loss, shared by the methods that use it."""

    temperature: PositiveFloat = 0.05
    """tau."""
    gamma_pairs: MovingAverage = 0.8
    """gamma_1, of the moving averages of g, one of each direction per pair."""

    def contrastive_temperature(self) -> float:
        """tau."""
        return self.temperature


def split_file(name: str) -> tuple[Path, str] | None:
    """``path/to/file.py:method`` in its parts (the second may be empty); None for a name that is no file."""
    found = _FILE.fullmatch(name)
    return (Path(found["path"]), found["method"] or "") if found else None


def joined_name(path: Path, method: str) -> str:
    """The opposite of :func:`split_file`."""
    return f"{path.as_posix()}:{method}" if method else path.as_posix()


def relative_name(name: str, root: Path) -> str:
    """A file's name as a run folder stores it: relative to ``root``, so that both can be moved together."""
    file = split_file(name)
    if file is None or not file[0].is_absolute():
        return name
    return joined_name(Path(os.path.relpath(file[0], root.resolve())), file[1])
