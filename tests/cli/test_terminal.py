"""What files of others contain reaches the terminal without control characters."""

from __future__ import annotations

import io
import json

from rich.table import Table

from hansa.core.terminal import Terminal, printable
from hansa.runs.folder import MARKER
from hansa.runs.store.io import read_sealed, write_sealed

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
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    facts = read_sealed(folder / "out" / MARKER)
    write_sealed(folder / "out" / MARKER, {**facts, "client_names": [EVIL] * 6, "cites": [EVIL]})
    summary = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    (folder / "out" / "summary.json").write_text(json.dumps({**summary, "devices": [EVIL], "status": EVIL}))
    for command in (["show", "out"], ["show", "out", "--clients"], ["report", "out"], ["cite", "out"]):
        output = cli(*command).output
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output), command
