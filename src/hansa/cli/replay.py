"""``hansa replay``: repeat an asynchronous federation in simulation and compare the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hansa.cli import options as opt
from hansa.cli.console import report_errors, say


@report_errors
@opt.needs_code
def replay(
    folder: Annotated[Path, typer.Argument(help="Run folder of the server.")],
    trust: opt.Trust = False,
) -> None:
    """Replay an asynchronous federation in simulation.

    The run folder has the order in which updates arrived and the versions that they started from. With the data of all
    sites on this machine, the same server steps give the same bits. Exit code 1 if they do not.
    """
    from hansa.federation.serve import replay_run

    result = replay_run(folder, trust=trust)
    steps = result.run.state.round
    if result.exact:
        say(f"{folder}: {steps} server steps replayed, equal to the bit")
        return
    different = ", ".join(name for name, equal in result.equal.items() if not equal)
    say(f"{folder}: {steps} server steps replayed, {different} differ from the recorded run")
    raise typer.Exit(1)
