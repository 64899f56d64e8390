"""What is tried how often, and whether it ended well: runs those tests and prints a table (``make reliability``).

Tests say what they tried with the fixture ``tried``; the slow ones are run, too. ``--quick`` leaves them out.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

KINDS = {
    "signals": "SIGKILL, SIGTERM or Ctrl-C, at a chosen write or at a random moment; then the same command again",
    "faults": "full disks, pictures that vanish, writers that meet, endpoints that break off",
    "bad inputs": "files, settings and options that are wrong, malformed or absurd",
    "hostile archives": "shards, tables, links and pipes made to hang a reader, fill memory or lead out of a folder",
    "addresses": "host names and redirects that mean a private or local address",
}


class Tally:
    """Adds up what the tests say, by kind."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One test ended."""
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "tried" and isinstance(value, list | tuple):
                kind, count = str(value[0]), int(str(value[1]))
                self.tried[kind] += count
                self.failed[kind] += count if report.failed else 0

    def table(self) -> str:
        """As Markdown."""
        rows = [f"| {kind} | {text} | {self.tried[kind]} | {self.failed[kind]} |" for kind, text in KINDS.items()]
        return "\n".join(["| kind | what is done | tried | failed |", "| --- | --- | ---: | ---: |", *rows])


def main(arguments: list[str]) -> int:
    """Run the tests and print the table; 1 where one of them failed."""
    os.chdir(Path(__file__).resolve().parents[1])
    os.environ["HOLDFAST_ONLY_TRIED"] = "1"
    tally = Tally()
    chosen = ["-m", "not slow"] if "--quick" in arguments else []
    code = pytest.main(["-q", "-n", "auto", "--dist", "worksteal", *chosen], plugins=[tally])
    print(tally.table())
    unknown = tally.tried.keys() - KINDS.keys()
    if unknown:
        print(f"kinds that the table does not know: {', '.join(sorted(unknown))}", file=sys.stderr)
    return int(code != 0 or bool(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
