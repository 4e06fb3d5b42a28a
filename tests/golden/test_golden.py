"""Results are bit-identical to those of the commit that golden.json was recorded from.

Hashes depend on the machine's arithmetic: the version of torch, the instruction set it uses, the processor, and the
compiler of the native kernels. Where golden.json has none for this machine, the tests are skipped and say how to
record them.
"""

from __future__ import annotations

import os

import pytest

from golden import cases, runner
from hansa import presets

EVERY = 12
"""All cases of presets run, and of the others one in so many, a different one with each kind of kernels;
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


@pytest.mark.parametrize("kernels", runner.KERNELS)
def test_results_are_bit_identical_to_the_recorded_ones(kernels, tmp_path):
    every = 1 if ALL else EVERY
    first = runner.KERNELS.index(kernels) * every // len(runner.KERNELS)
    answer = runner.results(kernels, tmp_path, "--every", str(every), "--first", str(first))
    entry, found = expected(answer["arithmetic"]), answer["cases"]
    assert len(found) >= len(entry["cases"]) // every
    assert {name.split(" / ")[0] for name in found} >= set(cases.CATALOGUE)
    wrong = runner.differences({name: one for name, one in entry["cases"].items() if name in found}, found)
    assert not wrong, f"{len(wrong)} of {len(found)} cases ({entry['recorded']}):\n" + "\n".join(wrong)


@pytest.mark.parametrize("kernels", runner.KERNELS if ALL else runner.KERNELS[-1:])
@pytest.mark.parametrize("arguments", [(), ("--accept-changes", "version")], ids=["plain", "version accepted"])
def test_a_run_of_version_0_2_is_finished_to_the_bit_or_refused_by_its_version(arguments, kernels, tmp_path):
    """These two outcomes and no other: a traceback, a refusal that does not say why, or other bits are failures.

    A refusal comes before any arithmetic, so one kind of kernels shows it.
    """
    done = runner.resumed(kernels, runner.FOLDER, tmp_path / "run", *arguments)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    if done.returncode == 0:
        entry = expected(runner.results(kernels, tmp_path, "--describe")["arithmetic"])
        assert runner.of_folder(tmp_path / "run") == entry["folder"], said
    else:
        assert "version" in said, said
        assert "0.2" in said, said
