"""How long a page takes: 364 tasks, 100,100 dev images, from a cold start of the command to the file on disk.

    python benchmarks/report.py            writes benchmarks/results/report.json

Two runs are made up: one whose sealed set is retired (figures are read from the certificate), and one without sealed
images, where every bound is computed from dev images.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import commit, machine  # noqa: E402
from tests.report.fabricated import made_up_run  # noqa: E402

TASKS, EACH = 364, 275


def measure(run: Path) -> dict[str, float]:
    """Seconds of the whole command, its processor time, and bytes of the page."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    out = run.parent / "page.html"
    command = [sys.executable, "-m", "holdfast", "report", str(run), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "processor_seconds": round(used, 2), "bytes": out.stat().st_size}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    names = [f"place {number:03d}" for number in range(TASKS)]
    results: dict[str, object] = {"tasks": TASKS, "dev_images": TASKS * EACH, "machine": machine()}
    results |= {"commit": commit(), "load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        for sealed in ("passed", "none"):
            run = made_up_run(
                Path(folder) / sealed,
                names,
                each=EACH,
                drop=0.02,
                margin=0.1,
                sealed=sealed,
                steps=range(100, 1100, 100),
            )
            results["sealed set retired" if sealed == "passed" else "dev images only"] = measure(run)
    out = ROOT / "benchmarks" / "results" / "report.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
