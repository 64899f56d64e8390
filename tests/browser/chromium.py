"""A real Chromium, driven over the pipe of its DevTools protocol: load, run script, press keys, take pictures."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars",
    "--no-first-run", "--disable-extensions", "--disable-sync", "--remote-debugging-pipe",
    "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class Pipe:
    """Messages end with a zero byte; the browser reads from one pipe and writes to another."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing, self._rest = reading, writing, b""

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._writing, content) :]

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, or None when none came in time."""
        end = time.monotonic() + timeout
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            read = os.read(self._reading, 1 << 20)
            assert read, "the browser went away"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Tab:
    """One tab. ``complaints``: console errors, exceptions, refused loads; ``requests``: all addresses asked for."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come in between are noted."""
        number = next(self._numbers)
        self._pipe.send({"id": number, "method": method, "params": parameters, **self._session})
        while True:
            message = self._pipe.receive(600)
            assert message is not None, f"no answer to {method}"
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, answer = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(answer["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and answer["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(answer["args"])[:500])
        elif method == "Log.entryAdded" and answer["entry"]["level"] in ("error", "warning"):
            self.complaints.append(answer["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(answer["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Load a file at a width and wait for it."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            if (message := self._pipe.receive(600)) is None:
                raise AssertionError("the browser said nothing for ten minutes")
            self._note(message)

    def resize(self, width: int, height: int = 900) -> None:
        """Another size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(json.dumps(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def key(self, name: str, code: int) -> None:
        """Press and let go of a key."""
        text = {"Enter": "\r", " ": " "}.get(name)
        more = {"text": text} if text else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code,
                **(more if kind == "keyDown" else {}),
            )  # fmt: skip

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A screenshot."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with an empty profile and one tab; gone afterwards."""
    assert PROGRAM is not None
    profile = tempfile.mkdtemp(prefix="chromium-")
    to_read, we_write = os.pipe()
    we_read, to_write = os.pipe()
    # The browser expects its ends of the pipes as descriptors 3 and 4.
    shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(to_read, to_write),
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Tab(Pipe(we_read, we_write))
    finally:
        process.terminate()
        process.wait()
        os.close(we_read)
        os.close(we_write)
        shutil.rmtree(profile, ignore_errors=True)
