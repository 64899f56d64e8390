"""A command line in this process, for every file of this folder."""

import pytest

from tests.certify.test_cli import Shell


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)
