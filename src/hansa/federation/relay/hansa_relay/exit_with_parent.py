"""Run a program that is killed when its parent process ends: ``python exit_with_parent.py PARENT PROGRAM ...``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Ask Linux for SIGKILL when the parent dies, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
