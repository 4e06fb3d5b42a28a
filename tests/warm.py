"""Processes that start in milliseconds: forks of an interpreter that has imported torch and Hansa, and nothing else.

An interpreter spends about two seconds of a core on these imports. `Popen` is `subprocess.Popen`, except that
``[sys.executable, "-c", PROGRAM, ...]``, ``[sys.executable, "-m", MODULE, ...]`` and ``[sys.executable, SCRIPT, ...]``,
also with ``-W error``, are executed by a fork of a server, one per test process, that did nothing but import. The fork
has the arguments, environment, folder, descriptors and session that a new interpreter would have, it is a child of the
test, and it ends as an interpreter does. What a fork cannot imitate (another program, other options, another encoding
or number of threads) starts as usual. Tests of how a process starts use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch",
    "hansa",
    "hansa.engine.processes",
    "hansa.study.parallel",
    "hansa.runs.experiment",
    "hansa.cli.app",
)
AT_START = ("PYTHON", "LANG", "LC_", "OMP_", "MKL_", "OPENBLAS_", "LD_")
"""Prefixes of variables that count when an interpreter or a library starts. ``PYTHONPATH`` is applied by the server."""

SUBREAPER, MESSAGE_BYTES = 36, 1 << 17
_Plain = subprocess.Popen
_SIGNATURE = inspect.signature(_Plain._execute_child)  # type: ignore[attr-defined]


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(AT_START)}
    return {name: value for name, value in found.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}


class _Server:
    """The interpreter that is forked, for this test process."""

    current: _Server | None = None

    def __init__(self) -> None:
        import hansa

        self.owner, self.environment = os.getpid(), _at_start(os.environ)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), str(Path(hansa.__file__).parents[1])]
            self.process = _Plain(command, pass_fds=[theirs.fileno()], env=plain, stdin=subprocess.DEVNULL)
        atexit.register(self.close)

    def close(self) -> None:
        if self.owner == os.getpid():
            self.control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it too
            self.control.close()
            self.process.wait()

    def fork(self, request: Mapping[str, Any], descriptors: Mapping[int, int]) -> int:
        """Return the number of a new child of this process, with the descriptors under the numbers given first."""
        message = json.dumps({**request, "descriptors": list(descriptors)}).encode()
        prctl = ctypes.CDLL(None).prctl
        prctl(SUBREAPER, 1, 0, 0, 0)  # the fork of a fork becomes a child of this process, not of the first one
        try:
            socket.send_fds(self.control, [message], list(descriptors.values()))
            answer = self.control.recv(64)
        finally:
            prctl(SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise OSError("the server of warm processes has ended")
        return int(answer)


class Popen(_Plain):  # type: ignore[type-arg]
    """`subprocess.Popen` that forks the server where it can."""

    def _execute_child(self, *arguments: Any) -> None:
        words = _SIGNATURE.bind(self, *arguments).arguments
        environment = dict(os.environ if words["env"] is None else words["env"])
        program = _program(words["args"])
        plain = words["preexec_fn"] is None and not words["shell"] and words["close_fds"]
        server = _server() if plain and program and sys.platform == "linux" else None
        if server is None or server.environment != _at_start(environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        request = {
            **program,
            "environment": environment,
            "folder": os.fspath(words["cwd"] or os.getcwd()),
            "session": bool(words["start_new_session"]),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        streams = {0: words["p2cread"], 1: words["c2pwrite"], 2: words["errwrite"]}
        descriptors = {number: number if given == -1 else given for number, given in streams.items()}
        descriptors |= {number: number for number in words["pass_fds"]}
        try:
            self.pid = server.fork(request, descriptors)
            self._child_created = True
        finally:
            pipes = [words[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _server() -> _Server:
    if _Server.current is None or _Server.current.owner != os.getpid():
        _Server.current = _Server()
    return _Server.current


def _program(command: Any) -> dict[str, Any]:
    """What the command of an interpreter executes; empty if a fork cannot do it."""
    words = [] if isinstance(command, (str, bytes)) else [os.fspath(word) for word in command]
    if not words or words.pop(0) != sys.executable:
        return {}
    strict = words[:2] == ["-W", "error"]
    del words[: 2 * strict]
    if words[:1] in (["-c"], ["-m"]) and len(words) > 1:
        return {"kind": words[0], "program": words[1], "arguments": words[2:], "strict": strict}
    if words and not words[0].startswith("-"):
        return {"kind": "script", "program": words[0], "arguments": words[1:], "strict": strict}
    return {}


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with `Popen`."""
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        return subprocess.run(*arguments, **options)
    finally:
        subprocess.Popen = _Plain  # type: ignore[misc]


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each request; return it in the forks, which are as new interpreters are."""
    base = list(sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        message, received, *_ = socket.recv_fds(control, MESSAGE_BYTES, 256)
        if not message:
            os._exit(0)
        request: dict[str, Any] = json.loads(message)
        reading, writing = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])  # inherited, as by a new interpreter
        between = os.fork()
        if between:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(writing)
            for descriptor in received:
                os.close(descriptor)
            answer = os.read(reading, 32)
            os.close(reading)
            os.waitpid(between, 0)
            control.send(answer)
            continue
        number = os.fork()
        if number:
            os.write(writing, str(number).encode())
            os._exit(0)
        control.close()
        _become(request, received, base)
        return request


def _become(request: dict[str, Any], received: list[int], base: list[str]) -> None:
    if request["session"]:
        os.setsid()
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in received]
    os.closerange(3, 1000)
    for descriptor, wanted in zip(above, request["descriptors"], strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # anew: a stream knows whether its file can seek
        before = getattr(sys, name)
        options = {"encoding": before.encoding, "errors": before.errors, "closefd": False}
        stream = open(number, "w" if number else "r", 1 if number == 2 else -1, **options)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    script = request["kind"] == "script"
    first = {"-c": "", "-m": os.getcwd()}.get(request["kind"]) if not script else os.path.dirname(request["program"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(first), *paths, *base]
    sys.argv[:] = [request["program"] if script else request["kind"], *request["arguments"]]
    if request["strict"]:
        warnings.simplefilter("error")


if __name__ == "__main__":
    sys.path[0] = sys.argv[2]  # the Hansa of the tests, also where another one is installed
    for _each in IMPORTED:
        importlib.import_module(_each)
    del sys.path[0]
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    for _each in [name for name in globals() if not name.startswith("_")]:
        del globals()[_each]
    if _request["kind"] == "-m":
        from runpy import _run_module_as_main  # type: ignore[attr-defined]

        _run_module_as_main(_request["program"])
    elif _request["kind"] == "script":
        with open(__file__ := _request["program"], encoding="utf-8") as _source:
            _text = _source.read()
        exec(compile(_text, __file__, "exec", dont_inherit=True))
    else:
        del __file__
        exec(compile(_request["program"], "<string>", "exec", dont_inherit=True))
