"""Runs on_simulated_device.py in a process of its own: torch must know a device before the first gradient of a process,
and cannot forget it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUNS = Path(__file__).with_name("on_simulated_device.py")


@pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="no simulated device: torch before 2.9 has no devices written in Python"
)
def test_frozen_weights_and_determinism_on_a_simulated_device():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(RUNS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "4 passed" in done.stdout, done.stdout[-2000:]
