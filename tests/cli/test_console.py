"""How commands end: on closed pipes, full disks, poor and lost terminals, and with names that look like markup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import warm
from hansa.runs.folder import RunFolder


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
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    child = start(folder, "show", "out", stdout=subprocess.PIPE, env=environment)
    shown, message = child.communicate()
    assert (child.returncode, message) == (0, b"")
    assert b"test accuracy" in shown
    assert shown.isascii()


@pytest.mark.parametrize("name", ["x[/0.1]", "[/]"])
def test_names_that_look_like_markup_are_names(cli, folder, name):
    result = cli("run", "small.yaml", "-o", name.replace("/", "|") if "/]" in name else name, "-s", f"name='{name}'")
    assert result.exit_code == 0, result.output
    assert f"{name}: round 3/3" in result.stderr
    failed = cli(
        "run", "small.yaml", "-o", "f", "-q", "-s", "aggregate={kind: krum, byzantine: 9}", "-s", f"name='{name}'"
    )
    assert failed.exit_code == 1
    assert cli("resume", f"no{name}").exit_code == 2
    shown = cli("show", "f")
    assert shown.exit_code == 0, shown.output


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
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    assert cli("show", "out/config.yaml").stdout == cli("show", "out").stdout
    assert cli("report", "out/config.yaml").exit_code == 0
    assert cli("resume", "out/config.yaml", "-q", "-r", "4").exit_code == 0
    assert RunFolder(folder / "out").summary["rounds"] == 4
