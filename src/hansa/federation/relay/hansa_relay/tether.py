"""Runs a program that ends when whoever started it does, however that ended: ``python tether.py PROGRAM ...``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Ask Linux for SIGKILL at the parent's death, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
