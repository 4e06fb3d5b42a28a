"""Runs each on_simulated_device.py in a process of its own: torch must know a device before the first gradient of a
process, and cannot forget it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import warm

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="no simulated device: torch before 2.9 has no devices written in Python"
)
@pytest.mark.parametrize(("package", "least"), [("training", 7), ("rounds", 100)])
def test_presets_frozen_weights_and_determinism_on_a_simulated_device(package, least):
    file = TESTS / package / "on_simulated_device.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = warm.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-2000:]
