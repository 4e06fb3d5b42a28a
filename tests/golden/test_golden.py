"""Results are bit-identical to those of the commit that golden.json was recorded from.

Hashes depend on the machine's arithmetic: the version of torch, the instruction set it uses, the processor, and the
compiler of the native kernels. Where golden.json has none for this machine, the tests are skipped and say how to
record them.
"""

from __future__ import annotations

import logging
import os

import pytest

from golden import cases, runner
from hansa import presets

EVERY = 12
"""`runner.sampled` names the cases that run with each kind of kernels, of those beside the presets one in so many;
HANSA_GOLDEN=all runs all of them."""

ALL = os.environ.get("HANSA_GOLDEN") == "all"
RECORD = "`python tests/golden/record.py` records them; do so at a commit whose results are known to be right"


def expected(facts):
    """What was recorded on a machine like this one, or a skip that says what is missing."""
    if facts["kernels"] == "none":
        pytest.skip("the native kernels were not built, or this machine does not run them")
    entry = runner.recorded().get(facts["machine"], {}).get(facts["kernels"])
    if entry is None:
        pytest.skip(f"no golden hashes for this arithmetic: {facts['machine']}; kernels {facts['kernels']}. {RECORD}")
    return entry


def test_every_preset_has_golden_cases():
    assert set(cases.CATALOGUE) == set(presets.catalogue())


def test_every_kind_of_kernels_has_every_preset_and_all_kinds_together_every_case_of_one():
    chosen = {kernels: set(runner.sampled(kernels, EVERY)) for kernels in runner.KERNELS}
    for kernels in ("avx512", "avx2"):
        assert chosen[kernels] >= {f"{name} / {task}" for name in cases.CATALOGUE for task in ("mlp", "norm")}
    for name in cases.CATALOGUE:
        assert chosen["off"] & {f"{name} / mlp", f"{name} / norm"}
    assert set().union(*chosen.values()) >= {name for name in cases.CASES if name.split(" / ")[0] in cases.CATALOGUE}
    assert all(runner.sampled(kernels, 1) == list(cases.CASES) for kernels in runner.KERNELS)


@pytest.mark.parametrize("kernels", runner.KERNELS)
def test_results_are_bit_identical_to_the_recorded_ones(kernels, caplog):
    caplog.set_level(logging.ERROR, logger="hansa")
    with runner.using(kernels):
        entry = expected(runner.arithmetic())
        found = runner.run_cases(runner.sampled(kernels, 1 if ALL else EVERY))
    wrong = runner.differences({name: one for name, one in entry["cases"].items() if name in found}, found)
    assert not wrong, f"{len(wrong)} of {len(found)} cases ({entry['recorded']}):\n" + "\n".join(wrong)
