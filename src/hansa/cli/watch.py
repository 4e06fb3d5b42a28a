"""``hansa watch``: the report page while runs go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hansa.cli.console import guarded, out

PORT = 8642


@guarded
def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or folders with runs below them; by default runs.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help=f"Of 127.0.0.1; 0 takes any. By default {PORT}, or any if that is taken.", min=0)
    ] = None,
) -> None:
    """Show runs in a browser as they go: the page of `hansa report`, live. Ctrl-C ends it, the runs go on.

    Only this machine can ask, and only with the token in the address. From elsewhere: ssh -L 8642:127.0.0.1:8642 HOST.
    """
    from hansa.core.errors import HansaError
    from hansa.study.report.live import Server, Watch

    places = runs or [Path("runs")]
    if missing := [place for place in runs or [] if not place.is_dir()]:
        raise HansaError(f"{missing[0]}: no such folder. Name the folder of a run, or one with runs below it.")
    found = Watch(places)
    try:
        server = Server(found, PORT if port is None else port)
    except HansaError:
        if port is not None:
            raise
        server = Server(found, 0)
    found.start()
    out().print(f"watching {', '.join(map(str, places))}: {server.address}", markup=False, soft_wrap=True)
    out().print("Ctrl-C ends this; runs go on.", style="dim")
    out().file.flush()
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        out().print("stopped watching", style="dim")
    finally:
        server.server_close()
        found.close()
