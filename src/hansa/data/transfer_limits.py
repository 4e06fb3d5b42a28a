"""Connections that may not be slow for ever: an answer must begin in time, and go on at a least rate."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

SLOWEST = 8 * 1024
"""Bytes a second below which a connection is given up: the largest data set takes six hours at that rate."""


class TooSlow(Exception):
    """A connection that lives, but gives next to nothing."""


class Pace:
    """Notes bytes as they come; `TooSlow` where a window of so many seconds brought less than the least rate.

    >>> clock = iter([0.0, 1.0, 2.5, 5.0])
    >>> pace = Pace(2.0, clock=lambda: next(clock))
    >>> pace.note(100), pace.note(10**6)
    (None, None)
    >>> pace.note(100)
    Traceback (most recent call last):
    hansa.data.transfer_limits.TooSlow: 40 bytes a second, at least 8192 are expected
    """

    def __init__(self, window: float, slowest: int = SLOWEST, clock: Callable[[], float] = time.monotonic) -> None:
        self.window, self.slowest, self.clock = window, slowest, clock
        self.began, self.bytes = clock(), 0

    def note(self, count: int) -> None:
        """So many bytes have come."""
        self.bytes += count
        passed = self.clock() - self.began
        if passed < self.window:
            return
        if self.bytes < self.slowest * passed:
            raise TooSlow(f"{self.bytes / passed:.0f} bytes a second, at least {self.slowest} are expected")
        self.began, self.bytes = self.began + passed, 0


class _Awaited(http.client.HTTPConnection):
    """A connection whose answer must begin, headers and all, within its timeout: not only each byte of it."""

    def getresponse(self) -> http.client.HTTPResponse:
        watch = threading.Timer(float(self.timeout or 30.0), _cut, (self.sock,))
        watch.daemon = True
        watch.start()
        try:
            return super().getresponse()
        finally:
            watch.cancel()


class _AwaitedTLS(_Awaited, http.client.HTTPSConnection):
    pass


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Awaited, request)


class _TLS(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_AwaitedTLS, request, context=getattr(self, "_context", None))


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """As ``urllib.request.urlopen``, for connections that answer in time."""
    return urllib.request.build_opener(_Plain, _TLS).open(request, timeout=timeout)


def _cut(sock: socket.socket | None) -> None:
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended by itself
            return
