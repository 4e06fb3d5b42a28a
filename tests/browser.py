"""A headless Chromium, spoken to over its debugging pipe: no driver, no package, no port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """The browser's program, or a skipped test that says so; with HANSA_BROWSER=1 a missing one is a failure."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        output = f"no browser, none of {', '.join(NAMES)}: pages are NOT tested (apt-get install chromium)"
        (pytest.fail if os.environ.get("HANSA_BROWSER") == "1" else pytest.skip)(output)
    return found


class Browser:
    """One page at a time. ``console`` has every error, warning and exception that the page made."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="browser")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        def wire():
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self.folder}", "--hide-scrollbars", "--mute-audio"]
        flags += ["--disable-extensions", "--disable-background-networking", "--disable-component-update"]
        self._process = subprocess.Popen(
            [find(), *flags, "about:blank"],
            preexec_fn=wire,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._answers, self._buffer, self._session = 0, {}, b"", None
        self.console, self.requests = [], []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self.folder, ignore_errors=True)

    def open(self, where, width=1180, height=900, dark=False):
        """Open a file or an address in a window of a size, light or dark, and wait until it is loaded."""
        self.console.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=where.as_uri() if isinstance(where, Path) else where)
        self.until(lambda: self._loaded or self._pump())

    def run(self, code):
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", {}).get("description") or found)
        return found["result"].get("value")

    def until(self, met, seconds=20.0):
        """Wait until something is so; returns it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.run(met) if isinstance(met, str) else met()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"after {seconds} s still not: {met}")

    def mouse(self, kind, x, y, **more):
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start, end):
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", clickCount=1)
        self.mouse("mouseMoved", *end, button="left")
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            code = {"Escape": 27, "ArrowRight": 39}[key]
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def _call(self, method, **arguments):
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self._pump()
        found = self._answers.pop(number)
        assert "error" not in found, found
        return found["result"]

    def _pump(self):
        ready, _, _ = select.select([self._from], [], [], 20)
        assert ready, "the browser does not answer: a script that never ends?"
        chunk = os.read(self._from, 1 << 20)
        assert chunk, "the browser has gone"
        *messages, self._buffer = (self._buffer + chunk).split(b"\0")
        for raw in messages:
            message = json.loads(raw)
            if "id" in message:
                self._answers[message["id"]] = message
                continue
            method, output = message["method"], message["params"]
            if method == "Page.loadEventFired":
                self._loaded = True
            elif method == "Runtime.exceptionThrown":
                self.console.append(output["exceptionDetails"].get("exception", {}).get("description", str(output)))
            elif method == "Runtime.consoleAPICalled" and output["type"] in ("error", "warning", "assert"):
                self.console.append(str(output["args"]))
            elif method == "Log.entryAdded" and output["entry"]["level"] in ("error", "warning"):
                self.console.append(f"{output['entry']['text']} {output['entry'].get('url', '')}")
            elif method == "Network.requestWillBeSent":
                self.requests.append(output["request"]["url"])
