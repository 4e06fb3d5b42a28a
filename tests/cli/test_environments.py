"""Commands in an unusual environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cli.conftest import SMALL

COMMANDS = """\
run small.yaml --out läufe/erster -q
resume läufe/erster --rounds 4 -q
show läufe/erster
report läufe/erster -o seite.html
export läufe/erster -o modell.safetensors
doctor
"""
PROGRAM = """
import os, sys
from hansa.cli import main
for line in sys.stdin.buffer.read().splitlines():
    sys.argv = ["hansa", *map(os.fsdecode, line.split())]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise SystemExit(f"{line}: exit code {end.code}")
"""


@pytest.mark.skipif(os.name != "posix", reason="umask and hangups are of POSIX")
def test_no_home_spaces_umlauts_a_c_locale_umask_077_and_an_ignored_hangup(tmp_path):
    folder, temporary = tmp_path / os.fsdecode("größe und maß".encode()), tmp_path / "a temporary folder"
    folder.mkdir()
    temporary.mkdir()
    (folder / "small.yaml").write_text(SMALL)
    left_out = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HANSA_CREATED_RUNS", "PYTHONIOENCODING")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": str(temporary)}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)

    def become():
        os.umask(0o077)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=COMMANDS.encode(), cwd=folder, env=variables, preexec_fn=become,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "seite.html").stat().st_mode & 0o077 == 0
    assert (folder / "modell.safetensors").stat().st_size > 0
    assert not list(temporary.iterdir())
