"""No module needs what only POSIX has: without it everything imports, and a run trains, is stored and is resumed.

This machine is not Windows. The test takes away what Windows lacks, and stands in for its lock. What needs it is
refused in a sentence (`hansa serve`, `hansa join`) or replaced (worker processes). Paths, consoles, the lock and the
processes of Windows itself are not exercised; docs/reliability.md lists what was tested where.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, logging, os, pkgutil, signal, socket, sys, types
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
    if not found.name.endswith("_kernels"):
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

# worker processes are not to be had: threads, or one process with a warning, and the same result
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("hansa").addHandler(handler)
eager = hansa.Task(lambda: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, rows, execution="eager")
alone = hansa.run(method, eager, rounds=2, workers=1)
pair = hansa.run(method, eager, rounds=2, workers=2)
assert torch.equal(alone.params, pair.params)
assert any("worker processes need a POSIX system" in line for line in said), said

# commands: a run, its report, and a federation that is refused in one sentence
from hansa.cli import main
def command(*words):
    sys.argv = ["hansa", *words]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0
with open("small.yaml", "w") as file:
    file.write("{rounds: 2, data: {name: fashion-mini, clients: 4}, local: {steps: 2, batch_size: 8}}")
assert command("run", "small.yaml", "--out", "runs/small", "--workers", "1", "--quiet") == 0
assert command("resume", "runs/small", "--rounds", "3", "--quiet") == 0
assert command("report", "runs/small", "-o", "page.html") == 0 and os.path.getsize("page.html") > 10_000
assert command("doctor") == 0
print("refusals:", file=sys.stderr, flush=True)
assert command("serve", "small.yaml", "--insecure") != 0
assert command("join", "127.0.0.1:8443", "--site", "north", "--data", "config", "--insecure") != 0
print("imported", count)
"""


def test_every_module_imports_without_what_only_posix_has(tmp_path):
    source = Path(__file__).parents[1] / "src"
    program = f"import sys; sys.path.insert(0, {str(source)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "imported" in done.stdout
    refusals = done.stderr.partition("refusals:")[2]
    assert refusals.count("Windows Subsystem for Linux") == 2, refusals
    assert "Traceback" not in refusals
