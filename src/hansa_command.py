"""What the command ``hansa`` starts. It stands outside the package, whose import takes seconds, so that Ctrl-C is quiet
from the first moment on."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import the command line, and run it."""
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from hansa.cli import main as run
    from hansa.cli.app import app  # noqa: F401  (all that takes long)

    signal.signal(signal.SIGINT, before)
    run()
