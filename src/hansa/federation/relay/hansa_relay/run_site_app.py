"""Replaces ``flwr-clientapp`` at a site: runs the installed app and ignores any bundle from the server.

A bundle is never unpacked, imported or run at a site. With ``--serve SOCKET`` it waits for tasks and forks a process
for each, which saves the second of imports that a new process needs; `send_task` is its client.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.supernode.runtime.run_clientapp as runtime
from flwr.clientapp import ClientApp
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

TASK_NAME = b"flwr-clientapp"
SET_NAME = 15  # of prctl


def main() -> None:
    """Run the task of the command line with Hansa's app."""
    _use_installed_app()
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        flwr_clientapp()


def _use_installed_app() -> None:
    from hansa_relay.client_app import app

    def load(*bundle: str) -> ClientApp:
        return app

    def loader(**options: Any) -> Callable[..., ClientApp]:
        return load

    def no_folder(*bundle: str) -> Path:
        return Path()

    def no_install(*content: Any, **options: Any) -> None: ...

    runtime.install_from_fab = no_install
    runtime.get_project_dir = no_folder
    runtime.get_load_client_app_fn = loader


def serve(path: str) -> None:
    """Fork a process for each task that is sent to a socket. Its exit code is the answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(8)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run_task(connection)
            connection.close()


def _run_task(connection: socket.socket) -> None:
    """Run one task in this process, which was forked for it, and exit."""
    code = 1
    try:
        _set_name(TASK_NAME)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with connection.makefile("rb") as lines:
            sys.argv[1:] = json.loads(lines.readline())
        flwr_clientapp()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        connection.sendall(b"%d\n" % code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _set_name(name: bytes) -> None:
    """Set the name of this process, by which the supervisor knows a task."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(SET_NAME, name)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
