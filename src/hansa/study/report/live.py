"""The page while runs go on: a server on this machine alone, whose address holds a secret."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hansa import __version__
from hansa.core.errors import HansaError
from hansa.study.report import run_discovery
from hansa.study.report.entries import Entry
from hansa.study.report.page import MARK, SCRIPTS, rendered, template
from hansa.study.report.payload import written
from hansa.study.report.sections import notices

LOOK = 0.4
"""Seconds between two looks at the folders; after a slow one, twice what it took."""
HOLD = 4.0
"""Seconds that a viewer's question may wait for something new."""
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_EMPTY: dict[str, Any] = {"target": None, "stride": 1, "runs": []}
_PARTS = (
    "notices", "tiles", "ranked_by", "table", "published", "targets", "sections", "graphs", "partition", "configs",
    "environment",
)  # fmt: skip


class Watch:
    """What there is to see in some folders, and below them, followed by a thread of its own."""

    def __init__(self, places: Sequence[Path], title: str = "Federated runs, live") -> None:
        self.places, self.title = list(places), title
        self.version, self.parts, self.content, self.told = "", dict.fromkeys(_PARTS, ""), _EMPTY, "looking"
        self._known: dict[Path, tuple[object, list[Entry], list[str]]] = {}
        self._seen: dict[Path, None] = {}
        self._shown: object = None
        self._news = threading.Condition()
        self._end = threading.Event()
        self._start = secrets.token_hex(4)
        self._count = 0
        self._thread = threading.Thread(target=self._follow, name="hansa watch", daemon=True)

    def start(self) -> None:
        """Look once, and go on looking."""
        self.look()
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        with self._news:
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def newer_than(self, version: str, seconds: float = HOLD) -> dict[str, Any]:
        """What a viewer of that version is told: all of it once there is something newer, which is waited for."""
        with self._news:
            self._news.wait_for(lambda: self.version != version or self._end.is_set(), seconds)
            found: dict[str, Any] = {"version": self.version, "told": self.told}
            if self.version != version:
                found.update(parts=self.parts, content=self.content)
            return found

    def look(self) -> bool:
        """Read what has changed since the last look; whether anything had."""
        folders = list(dict.fromkeys(run for place in self.places for run in run_discovery.runs_below(place)))
        self._seen.update(dict.fromkeys(folders))
        gone = [folder for folder in self._seen if folder not in set(folders)]
        stamps = {folder: run_discovery.stamp([folder]) for folder in folders}
        shown = (tuple(stamps.items()), tuple(gone))
        if shown == self._shown:
            return False
        for folder in folders:
            if folder not in self._known or self._known[folder][0] != stamps[folder]:
                self._known[folder] = (stamps[folder], *run_discovery.gathered([folder]))
        self._known = {folder: self._known[folder] for folder in folders}
        self._render(folders, gone)
        self._shown = shown
        return True

    def _render(self, folders: Sequence[Path], gone: Sequence[Path]) -> None:
        made = [entry for folder in folders for entry in self._known[folder][1]]
        problems = [problem for folder in folders for problem in self._known[folder][2]]
        problems += [f"{folder}: gone since it was last seen." for folder in gone]
        entries = run_discovery.put_together(made)
        if entries:
            parts, content = rendered(entries, problems=problems)
        else:
            where = ", ".join(map(str, self.places))
            parts = dict.fromkeys(_PARTS, "")
            parts["notices"] = notices(problems or [f"No run in {where} yet: this page shows them as they come."])
            content = _EMPTY
        rounds = sum(len(history) for entry in entries for history in entry.histories)
        with self._news:
            self._count += 1
            self.version = f"{self._start}-{self._count}"
            self.parts, self.content = parts, content
            self.told = f"live \u00b7 {rounds} rounds \u00b7 {time.strftime('%H:%M:%S')}"
            self._news.notify_all()

    def _follow(self) -> None:
        pause = LOOK
        while not self._end.wait(pause):
            before = time.monotonic()
            try:
                self.look()
            except (HansaError, OSError) as error:  # a folder that changes while it is read: look again
                with self._news:
                    self.told = f"looking again: {error}"
            pause = max(LOOK, 2 * (time.monotonic() - before))

    def page(self) -> str:
        """The whole page as it stands."""
        with self._news:
            version, parts, content, told = self.version, self.parts, self.content, self.told
        return template((*SCRIPTS, "live.js")).substitute(
            **parts,
            version=escape(__version__),
            title=escape(self.title),
            mark=MARK,
            lead="",
            facts="".join(f"<span>{escape(str(place))}</span>" for place in self.places),
            live=f'<span class="live" id="live" data-version="{escape(version)}">{escape(told)}</span>',
            policy="; connect-src 'self'",
            citations="",
            footer="It is served from this machine alone, to whoever has its address.",
            data=written(content),
        )


class Server(ThreadingHTTPServer):
    """Serves a `Watch` on loopback, under a token that only the terminal has shown.

    A question must name this machine as its host, so that no page of somebody else reaches it by another name, and
    carry the token, which is compared in constant time; everything else is 403.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, watch: Watch, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            told = f"port {port} of 127.0.0.1 cannot be had ({error}). Give another with --port, or 0 for any."
            raise HansaError(told) from error
        self.watch, self.token = watch, secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that goes away in the middle is nothing to tell of."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "hansa", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        token, _, place = asked.path.removeprefix("/").partition("/")
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in HOSTS or not known:
            self._answer(403, "text/plain", b"Served to whoever has the whole address, which the terminal shows.\n")
        elif not asked.path.endswith(f"{token}/{place}"):  # no slash behind the token
            self._answer(308, "text/plain", b"", {"Location": f"/{self.server.token}/"})
        elif place == "":
            self._answer(200, "text/html; charset=utf-8", self.server.watch.page().encode())
        elif place == "state":
            since = parse_qs(asked.query).get("since", [""])[0]
            found = json.dumps(self.server.watch.newer_than(since), allow_nan=False)
            self._answer(200, "application/json", found.encode())
        else:
            self._answer(404, "text/plain", b"Nothing here.\n")

    def _answer(self, code: int, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(code)
        heads = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            **(more or {}),
        }
        for name, value in heads.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Questions are nobody's news."""
