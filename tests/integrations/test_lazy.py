"""Nothing heavy is imported before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import integrations

HEAVY = ("transformers", "trl", "peft", "accelerate", "lightning", "timm", "datasets")


def test_importing_holdfast_imports_no_trainer() -> None:
    code = f"import sys, holdfast, holdfast.integrations; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_and_helpers_need_torch_alone() -> None:
    code = "import sys; from holdfast.integrations import RetentionSettings, evaluation_mode, frozen_copy\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_has_a_home() -> None:
    for name in integrations.__all__:
        assert getattr(integrations, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(integrations, "Nothing")  # noqa: B009 - what is asked for is no name of the module
