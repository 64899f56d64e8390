"""Certificates: tables of predictions in, verdicts out. No GPU, no torch, no model."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """``holdfast.certify(old, new)``: importing any module of this package binds its name in ``holdfast``.

    The function of the same name would be hidden by it, so calling the package calls the function.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """:func:`holdfast.certify.predictions.certify`."""
        from holdfast.certify.predictions import certify

        return certify(*arguments, **options)


sys.modules[__name__].__class__ = _Room
