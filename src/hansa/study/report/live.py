"""The live report page: an HTTP server on the loopback interface, protected by a token in its address."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hansa.core.errors import HansaError
from hansa.study.report.entries import ReportEntry, change_stamp, find_runs, merge_seeds, read_entries
from hansa.study.report.page import empty_content, fill_template, page_content, render_parts

POLL_SECONDS = 0.4
"""Seconds between two reads of the folders; after a slow read, twice its duration."""
HOLD_SECONDS = 4.0
"""Seconds that a request may wait for a new version."""
HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
TITLE = "Federated runs, live"


class RunWatcher:
    """Reads the runs in some folders and below them on request, and renders their page."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self.version, self.status, self.lost = "", "starting", False
        self.content: dict[str, Any] = empty_content()
        self._seen: dict[Path, None] = {}
        self._stamp: object = None
        self._lock, self._next_look = threading.Lock(), 0.0

    def newer_than(self, version: str, seconds: float = HOLD_SECONDS) -> dict[str, Any]:
        """Wait for a version other than ``version``, and return its content; only the status if there is none."""
        end = time.monotonic() + seconds
        self.look()
        while self.version == version and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 4)
            self.look()
        answer: dict[str, Any] = {"version": self.version, "status": self.status, "lost": self.lost}
        if self.version != version:
            content = self.content  # which another request may replace
            answer |= {"parts": render_parts(content), "content": content["data"]}
        return answer

    def look(self) -> None:
        """Read changed runs if the last read was long enough ago."""
        with self._lock:
            if (begun := time.monotonic()) < self._next_look:
                return
            try:
                self.refresh()
            except Exception as error:  # a folder that changed during the read: the next one repeats it
                self.status, self.lost, self._stamp = f"retrying: {error}"[:300], True, None
            ended = time.monotonic()
            self._next_look = ended + max(POLL_SECONDS, 2 * (ended - begun))

    def refresh(self) -> bool:
        """Read the runs that changed since the last call; return whether any did."""
        runs = list(dict.fromkeys(run for folder in self.folders for run in find_runs(folder)))
        self._seen.update(dict.fromkeys(runs))
        problems = [f"{run}: deleted since it was last read." for run in self._seen if run not in set(runs)]
        stamp = [(run, change_stamp(run)) for run in runs], problems
        if stamp == self._stamp:
            return False
        read = [_read_run(*pair) for pair in stamp[0]]
        problems = [problem for _, messages in read for problem in messages] + problems
        entries = merge_seeds([entry for run_entries, _ in read for entry in run_entries])
        if not entries and not problems:
            problems = [f"No run in {', '.join(map(str, self.folders))} yet. Runs appear here when they start."]
        self.content = _content(entries, problems)
        rounds = sum(len(history) for entry in entries for history in entry.histories)
        self.status, self.lost = f"live \u00b7 {rounds} rounds \u00b7 {time.strftime('%H:%M:%S')}", False
        self.version, self._stamp = secrets.token_hex(8), stamp
        return True

    def page(self) -> str:
        """Return the current page as HTML."""
        self.look()
        live = {"version": self.version, "status": self.status}  # before the content, which may be newer
        footer = "Served from this machine only, to those who have its address."
        return fill_template(self.content, title=TITLE, facts=list(map(str, self.folders)), footer=footer, live=live)


@lru_cache(maxsize=1000)
def _read_run(run: Path, stamp: object) -> tuple[list[ReportEntry], list[str]]:
    """Read a run folder, once for each state of its files."""
    return read_entries([run])


def _content(entries: Sequence[ReportEntry], problems: Sequence[str]) -> dict[str, Any]:
    """Return the content of the page; entries that cannot be shown become problems."""
    try:
        return page_content(entries, problems=problems) if entries else empty_content(problems)
    except Exception:
        failures: dict[str, str] = {}
        for entry in entries:
            try:
                page_content([entry])
            except Exception as error:
                failures[entry.name] = f"{entry.name}: cannot be shown ({error!r:.200})."
        if not failures:
            raise
        return _content([entry for entry in entries if entry.name not in failures], [*problems, *failures.values()])


class ReportServer(ThreadingHTTPServer):
    """Serves a `RunWatcher` on 127.0.0.1 under a random token.

    A request must name a loopback host, which defeats DNS rebinding, and carry the token, which is compared in constant
    time. Other requests get status 403.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, watcher: RunWatcher, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _RequestHandler)
        except (OSError, OverflowError) as error:
            message = f"cannot listen on port {port} of 127.0.0.1 ({error}). Pass another --port, or 0 for any."
            raise HansaError(message) from error
        self.watcher, self.token = watcher, secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""


class _RequestHandler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "hansa", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        token, _, path = url.path.removeprefix("/").partition("/")
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        authorized = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in HOSTS or not authorized:
            self._answer(403, "text/plain", b"Open the full address that the terminal shows.\n")
        elif url.path.endswith("/") and not path:
            self._answer(200, "text/html; charset=utf-8", self.server.watcher.page().encode("utf-8", "surrogateescape"))
        elif path == "state":
            since = parse_qs(url.query).get("since", [""])[0]
            state = json.dumps(self.server.watcher.newer_than(since), allow_nan=False)
            self._answer(200, "application/json", state.encode())
        else:
            self._answer(404, "text/plain", b"Not found.\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": content_type, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""
