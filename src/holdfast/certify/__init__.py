"""The certificate: tables of predictions in, verdicts out.

The package can be called: ``holdfast.certify(old, new, margin=0.02)`` is :func:`holdfast.certify.api.certify`. It has
the name of the function, and whichever of the two is imported first, ``from holdfast import certify`` must give
something that answers.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        from holdfast.certify.api import certify

        return certify(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
