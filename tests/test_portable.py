"""No module needs what only POSIX has: without it everything imports, and a run trains, is stored and is resumed.

This machine is not Windows. The test takes away what Windows lacks, and stands in for its lock. Worker processes,
sockets, signals and paths of Windows are not exercised.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, os, pkgutil, signal, socket, sys, types
import cloudpickle, networkx, numpy, platformdirs, pydantic, rich.progress, scipy.optimize, torch, typer
import safetensors.torch
import asyncio, concurrent.futures, importlib.metadata, logging.handlers, multiprocessing.pool, uuid  # these may use it

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "posix")
SIGNALS = ("SIGHUP", "SIGKILL", "SIGSTOP", "SIGCONT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT", "SIGCHLD", "SIGPIPE")
CALLS = (
    "fork", "getuid", "geteuid", "getgid", "killpg", "setsid", "sched_getaffinity", "memfd_create", "uname", "pwrite",
    "pread", "preadv", "pwritev", "posix_fallocate", "fchmod", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY",
)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ImportError(f"{name} is only on POSIX")

sys.meta_path.insert(0, Absent())
for name in MODULES:
    sys.modules.pop(name, None)
for module, names in ((signal, SIGNALS), (socket, ("AF_UNIX", "SO_PEERCRED")), (os, CALLS)):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda file, mode, size: None)

import hansa
count = 0
for found in pkgutil.walk_packages(hansa.__path__, "hansa."):
    if ".relay" not in found.name and not found.name.endswith("_kernels"):  # the relay runs inside Flower
        importlib.import_module(found.name)
        count += 1
assert count > 100, count

rows = hansa.data.from_arrays(torch.rand(40, 3), torch.arange(40) % 2, clients=4)
task = hansa.Task(lambda: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, rows)
method = hansa.presets.scaffold(steps=2, local_lr=0.1, batch_size=5)
whole = hansa.run(method, task, rounds=4, workers=1)
hansa.run(method, task, rounds=2, workers=1, out="run")
again = hansa.resume("run", method, task, rounds=4, workers=1)
assert torch.equal(again.params, whole.params)
print("imported", count)
"""


def test_every_module_imports_without_what_only_posix_has(tmp_path):
    source = Path(__file__).parents[1] / "src"
    program = f"import sys; sys.path.insert(0, {str(source)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "imported" in done.stdout
