"""How commands end: on closed pipes, full disks, poor and lost terminals, and with names that look like markup."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.table import Table

import hansa
import warm
from cli.conftest import SMALL
from hansa.core.terminal import Terminal, printable
from hansa.runs.folder import MARKER, RunFolder
from hansa.runs.store.io import read_sealed, write_sealed


def start(folder, *arguments, **options):
    command = [sys.executable, "-c", "from hansa.cli import main; main()", *map(str, arguments)]
    return warm.Popen(command, cwd=folder, stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["presets"], ["config", "schema"]])
def test_output_that_does_not_fit_is_told_in_one_sentence(folder, arguments):
    with open("/dev/full", "w") as full:
        child = start(folder, *arguments, stdout=full)
        message = child.communicate()[1].decode()
    assert child.returncode == 1
    assert message.count("\n") == 1
    assert "No space left on device" in message


def test_a_reader_that_leaves_is_no_error(folder):
    child = start(folder, "config", "schema", stdout=subprocess.PIPE)
    child.stdout.close()
    assert child.communicate()[1] == b""
    assert child.returncode == 1


def test_a_terminal_without_letters_gets_other_ones(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    child = start(folder, "show", "out", stdout=subprocess.PIPE, env=environment)
    shown, message = child.communicate()
    assert (child.returncode, message) == (0, b"")
    assert b"test accuracy" in shown
    assert shown.isascii()


@pytest.mark.parametrize("name", ["x[/0.1]", "[/]"])
def test_names_that_look_like_markup_are_names(cli, folder, name):
    result = cli.ok("run", "small.yaml", "-o", name.replace("/", "|") if "/]" in name else name, "-s", f"name='{name}'")
    assert f"{name}: round 3/3" in result.stderr
    failed = cli(
        "run", "small.yaml", "-o", "f", "-q", "-s", "aggregate={kind: krum, byzantine: 9}", "-s", f"name='{name}'"
    )
    assert failed.exit_code == 1
    cli.refused("resume", f"no{name}")
    cli.ok("show", "f")


def test_ctrl_c_while_the_command_starts_is_quiet(folder):
    command = [sys.executable, "-c", "import hansa_command; print('up', flush=True); hansa_command.main()", "presets"]
    for pause in (0.0, 0.1, 0.2, 0.3, 0.4):
        child = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        child.stdout.readline()
        time.sleep(pause + 0.1)
        child.send_signal(signal.SIGINT)
        _, message = child.communicate(timeout=60)
        assert b"Traceback" not in message
        assert child.returncode in (0, 130, -signal.SIGINT)  # the last while the interpreter ends


def test_a_run_is_opened_by_a_file_in_it(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    assert cli("show", "out/config.yaml").stdout == cli("show", "out").stdout
    cli.ok("report", "out/config.yaml")
    cli.ok("resume", "out/config.yaml", "-q", "-r", "4")
    assert RunFolder(folder / "out").summary["rounds"] == 4


EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"


def test_only_styles_of_the_program_become_codes():
    output = io.StringIO()
    console = Terminal(file=output, force_terminal=True, width=100, color_system="standard")
    console.print(EVIL, style="bold", markup=False)
    table = Table(EVIL)
    table.add_row(EVIL)
    console.print(table)
    written = output.getvalue()
    assert "\x1b[1m" in written
    assert printable(EVIL) in written
    for code in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e"):
        assert code not in written


def test_names_and_devices_of_a_run_of_others_are_printed_without_them(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    facts = read_sealed(folder / "out" / MARKER)
    write_sealed(folder / "out" / MARKER, {**facts, "client_names": [EVIL] * 6, "cites": [EVIL]})
    summary = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    (folder / "out" / "summary.json").write_text(json.dumps({**summary, "devices": [EVIL], "status": EVIL}))
    for command in (["show", "out"], ["show", "out", "--clients"], ["report", "out"], ["cite", "out"]):
        output = cli(*command).output
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output), command


RAW_PRINTS = {"f'hansa {__version__}'", "json.dumps(json_schema(), indent=2, allow_nan=False)", "EXAMPLE"}
"""What is printed as it is: all of it is Hansa's own."""


def test_no_text_goes_round_the_function_for_all_text():
    """In errors, in the log, and by every print of the package."""
    assert str(hansa.HansaError(EVIL)) == printable(EVIL)
    record = logging.makeLogRecord({"msg": "%s", "args": (EVIL,)})
    assert logging.getLogger("hansa").filter(record)
    assert record.getMessage() == printable(EVIL)
    for path in sorted(Path(hansa.__file__).parent.rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)):
            name, given = ast.unparse(call.func), [ast.unparse(argument) for argument in call.args]
            if name == "print":
                assert all(text in RAW_PRINTS or text.startswith("printable(") for text in given), (path, given)
            if name == "logging.getLogger":  # a logger below "hansa" would not be filtered
                assert given[0] in ("'hansa'", "'flwr'") or given[0].endswith(".name"), (path, given)
            assert not re.fullmatch(r"sys\.std(out|err)\.write|.*\bs?echo|(rich\.)?Console|warnings\.warn", name), path


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
