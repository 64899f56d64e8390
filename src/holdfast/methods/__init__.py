"""Methods: one file each (class, settings, registration), one contract (:mod:`holdfast.methods.base`)."""

from __future__ import annotations

from holdfast.methods.registry import build_method, register

__all__ = ["build_method", "register"]
