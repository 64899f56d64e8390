"""A web of our own: a server in a thread for good, slow, broken, huge, redirecting and disguised responses.

Nothing here answers after so many seconds: a slow server never answers, and what is to be held back waits for a gate
that the test opens. A test passes or fails alike on an idle machine and on a busy one.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from holdfast.data.retrieve.endpoint import EndpointConfig
from tests.processes import Forked

PATIENCE = 300.0  # seconds after which something is broken; no test waits so long where nothing is


class Gate:
    """Lets ``free`` requests pass and holds the others until it is opened."""

    def __init__(self, free: int = 0) -> None:
        self._free = free
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    async def passed(self) -> None:
        self._free -= 1
        while self._free < 0 and not self._opened.is_set():
            await asyncio.sleep(0.01)


def wait_until(reached: Callable[[], bool], process: Forked | subprocess.Popen[bytes]) -> None:
    """Until ``process`` has come so far, however long it takes; it must not end before."""
    while not reached():
        assert process.poll() is None, "the process ended too early"
        time.sleep(0.01)


class Web:
    """Runs ``handler(request)`` on 127.0.0.1 and counts the paths asked for."""

    def __init__(self, handler: Callable[[web.Request], object]) -> None:
        self.hits: Counter[str] = Counter()
        self.most_open = 0
        self._open = 0
        self._handler = handler
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _serve(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

        async def count(request: web.Request) -> web.StreamResponse:
            self.hits[request.path] += 1
            self._open += 1
            self.most_open = max(self.most_open, self._open)
            try:
                return await self._handler(request)
            finally:
                self._open -= 1

        async def start() -> None:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_route("*", "/{anything:.*}", count)
            self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.port = self._runner.addresses[0][1]
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)


def pictures_handler(make_picture: Callable[..., bytes], gate: Gate | None = None) -> Callable[[web.Request], object]:
    """What each path serves is in its name."""
    flaky: Counter[str] = Counter()

    async def handle(request: web.Request) -> web.StreamResponse:  # noqa: PLR0911, PLR0912
        parts = request.path.strip("/").split("/")
        kind, number = parts[0], int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
        good = web.Response(body=make_picture(number), content_type="image/jpeg")
        if kind == "good":
            return good
        if kind == "png":
            return web.Response(body=make_picture(number, form="PNG"), content_type="text/plain")
        if kind == "slow":
            await asyncio.Event().wait()
        if kind == "drip":
            response = web.StreamResponse(headers={"Content-Type": "image/jpeg"})
            await response.prepare(request)
            while True:
                await response.write(b"\xff\xd8\xff")
                await asyncio.sleep(0.05)
        if kind == "cut":
            body = make_picture(number)
            response = web.StreamResponse(headers={"Content-Type": "image/jpeg", "Content-Length": str(len(body))})
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            request.transport.close()
            return response
        if kind == "broken":
            return web.Response(body=make_picture(number)[:200], content_type="image/jpeg")
        if kind == "huge":  # says so
            response = web.StreamResponse(headers={"Content-Length": str(1 << 40)})
            await response.prepare(request)
            await response.write(b"\xff\xd8\xff" * 100)
            return response
        if kind == "endless":  # does not
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"\xff\xd8\xff" * 40_000)
        if kind == "html":
            return web.Response(text="<html><script>alert(1)</script></html>", content_type="image/jpeg")
        if kind == "svg":
            return web.Response(text="<svg xmlns='http://www.w3.org/2000/svg'/>", content_type="image/png")
        if kind == "gzip":
            body = gzip.compress(b"\0" * 10_000_000)
            return web.Response(body=body, headers={"Content-Encoding": "gzip", "Content-Type": "image/png"})
        if kind == "optout":
            return web.Response(body=make_picture(number), headers={"X-Robots-Tag": "noimageindex, NoAI"})
        if kind == "reserved":
            return web.Response(body=make_picture(number), headers={"TDM-Reservation": "1"})
        if kind == "redirect":
            return web.Response(status=302, headers={"Location": f"/good/{number}"})
        if kind == "chain":
            where = f"/chain/{number - 1}" if number else "/good/1"
            return web.Response(status=301, headers={"Location": where})
        if kind == "loop":
            return web.Response(status=307, headers={"Location": "/loop"})
        if kind == "to":
            return web.Response(status=302, headers={"Location": request.query["url"]})
        if kind == "status":
            return web.Response(status=number)
        if kind == "flaky":
            flaky[request.path] += 1
            return web.Response(status=503) if flaky[request.path] == 1 else good
        if kind == "tiny":
            return web.Response(body=make_picture(number, side=4))
        if kind == "held" and gate is not None:
            await gate.passed()
            return good
        return web.Response(status=404)

    return handle


def chat(content: object, tokens: tuple[int, int] = (10, 5)) -> web.Response:
    """A chat completion."""
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage})


def token_of(body: dict) -> str:
    """The token that the judge was asked to repeat."""
    system = body["messages"][0]["content"]
    start = system.index('"token": "') + len('"token": "')
    return system[start : system.index('"', start)]


def caption_of(body: dict) -> str:
    return json.loads(body["messages"][1]["content"])


def verdict_text(body: dict, verdict: str, reason: str = "because") -> str:
    """An answer in the form that was asked for."""
    return json.dumps({"token": token_of(body), "reason": reason, "verdict": verdict})


def config_of(server: Web, **changes: object) -> EndpointConfig:
    """A judge at ``server`` that is patient in all and quick to try again."""
    settings = {"model": "m", "timeout_seconds": PATIENCE, "first_wait_seconds": 0.01, "attempts": 4} | changes
    return EndpointConfig(f"{server.url}/v1", **settings)
