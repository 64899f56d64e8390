"""What a bar shows on terminals of several widths."""

import io
import re

import pytest
from rich.console import Console

from holdfast.train.progress import TerminalProgress


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_bar_the_steps_and_the_state_all_fit_a_terminal(columns: int) -> None:
    """The state stood beside the bar: from the first evaluation on, in 80 columns, neither bar nor steps were seen."""
    console = Console(file=(file := io.StringIO()), force_terminal=True, width=columns, color_system=None)
    with TerminalProgress("developing", 2000, console) as progress:
        progress.step(1200, {"objective": -12.3456})
        progress.evaluated(1200, {"dev_safety": -0.123, "target_gain": 0.234})
    bar, state = _last_frame(file.getvalue(), lines=2)
    assert re.fullmatch(r"developing [━╸╺ ]{10,}1200/2000 \d:\d\d:\d\d [-\d]+:[-\d:]+ *", bar)
    assert bar.count("━") >= 10
    assert state.strip() == "objective -12.346  worst class -12.3, target +23.4 points"
    assert max(len(bar.rstrip()), len(state.rstrip())) <= columns


def _last_frame(text: str, lines: int) -> list[str]:
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").rstrip("\n").split("\n")
    return shown[-lines:]
