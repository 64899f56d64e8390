"""How many requests `holdfast retrieve fetch` holds open, and how many pictures a second it stores.

    python benchmarks/retrieve_fetch.py [--pictures 20000]

The server is a process of its own on this machine and answers with JPEGs of 64 pixels. Two runs: one in which every
answer waits, to see the requests that are open at once, and one in which none does, to see the rate. Decoding and
encoding are measured alone as well, to say what bounds it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "retrieve_fetch.json"
SIDE = 64


def pictures(count: int) -> list[bytes]:
    """Small JPEGs of about 2 kB."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    made: list[bytes] = []
    for _ in range(count):
        coarse = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        sink = io.BytesIO()
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(sink, "JPEG", quality=85)
        made.append(sink.getvalue())
    return made


def serve(pipe: Any, wait: float) -> None:
    """Answer every request with a picture after ``wait`` seconds; say how many were open at once."""
    from aiohttp import web

    bodies = pictures(64)
    state = {"open": 0, "most": 0, "requests": 0}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/state":
            used = resource.getrusage(resource.RUSAGE_SELF)
            return web.json_response({**state, "cpu": used.ru_utime + used.ru_stime})
        state["open"] += 1
        state["requests"] += 1
        state["most"] = max(state["most"], state["open"])
        if wait:
            await asyncio.sleep(wait)
        state["open"] -= 1
        return web.Response(body=bodies[state["requests"] % 64], content_type="image/jpeg")

    async def main() -> None:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def prepare(folder: Path, port: int, count: int) -> None:
    """A folder in which ``count`` links were found and kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from holdfast.data.retrieve.judge import judge_none
    from holdfast.data.retrieve.search import SearchQuery, search
    from holdfast.data.retrieve.words import Words

    folder.mkdir(parents=True)
    rows = {"URL": [f"http://127.0.0.1:{port}/{i}.jpg" for i in range(count)], "TEXT": ["fog"] * count}
    pq.write_table(pa.table(rows), folder / "meta.parquet")
    search(str(folder / "meta.parquet"), SearchQuery(Words("fog"), ratio=0), folder / "out")
    judge_none(folder / "out")


def run(folder: Path, count: int, wait: float, concurrency: int) -> dict[str, Any]:
    """Fetch ``count`` pictures; seconds, rate, processor seconds of both sides, requests open at once."""
    from urllib.request import urlopen

    from holdfast.data.retrieve.download import FetchLimits
    from holdfast.data.retrieve.fetch import fetch

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    server = context.Process(target=serve, args=(sender, wait), daemon=True)
    server.start()
    port = receiver.recv()
    prepare(folder, port, count)

    def state() -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{port}/state") as answer:
            return json.load(answer)

    before, cpu, started = state(), time.process_time(), time.perf_counter()
    limits = FetchLimits(concurrency=concurrency, per_host=concurrency, allow_private=True, total_seconds=120)
    counts = fetch(folder / "out", limits)["counts"]
    seconds, cpu, after = time.perf_counter() - started, time.process_time() - cpu, state()
    server.terminate()
    server.join()
    if counts["images"] != count:
        raise SystemExit(f"lost pictures: {counts}")
    return {
        "pictures": count,
        "concurrency": concurrency,
        "server_waits_seconds": wait,
        "seconds": round(seconds, 2),
        "pictures_per_second": round(count / seconds),
        "most_requests_open": after["most"],
        "client_cpu_seconds": round(cpu, 2),
        "server_cpu_seconds": round(after["cpu"] - before["cpu"], 2),
        "client_cpu_ms_per_picture": round(1000 * cpu / count, 3),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def parts() -> dict[str, float]:
    """Processor milliseconds a picture of what is not the network: decode, encode and hash."""
    from holdfast.data.retrieve.images import ImageLimits, clean_image

    bodies = pictures(64)
    started = time.process_time()
    for index in range(2000):
        clean_image(bodies[index % 64], ImageLimits())
    return {"decode_encode_hash_ms": round((time.process_time() - started) / 2, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=20_000)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        held = run(Path(name) / "held", 4000, 0.5, 500)
        rate = run(Path(name) / "rate", given.pictures, 0.0, 500)
    alone = parts()
    result = {
        "command": f"benchmarks/retrieve_fetch.py --pictures {given.pictures}",
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load_before": round(load, 1)},
        "held_open": held,
        "rate": rate,
        "parts": alone,
        "bound": "processor: client and server share the cores; one event loop takes "
        f"{rate['client_cpu_ms_per_picture'] - alone['decode_encode_hash_ms']:.2f} ms a request, the picture "
        f"{alone['decode_encode_hash_ms']:.2f} ms",
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
