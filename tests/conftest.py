"""What all tests share: a fast tier, and a key of the test session by which run folders are recognised as one's own."""

from __future__ import annotations

import contextvars
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm

NOT_FAST = [
    "aggregate/test_min_norm.py", "cli", "compress/test_own.py", "config/test_own_parts.py",
    "core/native", "core/vectors/test_allocator.py",
    "data/test_memory_mapped.py", "e2e", "engine", "examples", "exactness", "federation", "fuzz",
    "golden", "metamorphic", "pace/test_runs.py", "rounds/measures",
    "runs/store/test_faults.py", "runs/test_record.py", "runs/test_experiment.py",
    "runs/test_folder_lock.py", "runs/test_per_client.py", "runs/test_provenance.py", "study",
    "test_containers.py", "test_documents.py", "test_looking.py", "test_site_in_browser.py",
    "training/test_augmented_runs.py",
    "training/test_batch_sources.py", "training/test_compiled.py", "training/test_evaluation.py",
    "training/test_execution_mode.py",
]  # fmt: skip
"""Folders and files that start processes, write pages or train for long. ``--fast`` leaves them out."""


# Two test processes share two cores: with more threads each, they spend half of their time waiting for each other.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
# The commands and workers that tests start compile Hansa once, not each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run only the tests for use while you work (make test-fast)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--fast"):
        return None
    relative = collection_path.relative_to(Path(__file__).parent).as_posix()
    return any(relative == name or relative.startswith(f"{name}/") for name in NOT_FAST) or None


@pytest.fixture(scope="session", autouse=True)
def _key_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("HANSA_CREATED_RUNS")
    os.environ["HANSA_CREATED_RUNS"] = str(tmp_path_factory.mktemp("key") / "created-runs.txt")
    yield
    if before is None:
        del os.environ["HANSA_CREATED_RUNS"]
    else:
        os.environ["HANSA_CREATED_RUNS"] = before


@pytest.fixture(scope="session", autouse=True)
def _warm_workers() -> Iterator[None]:
    """Worker processes of the tests are forks of an interpreter that has imported: see tests/warm.py."""
    from hansa.engine import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": warm.Popen}))
        yield


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes are new interpreters, as those of users are."""
    from hansa.engine import processes

    monkeypatch.setattr(processes, "subprocess", subprocess)


@pytest.fixture(scope="session")
def _worker_processes(_warm_workers: None) -> Iterator[object]:
    from hansa.engine import workers

    block = workers()
    contextvars.copy_context().run(block.__enter__)  # open until the end, but only current where a test asks for it
    yield block
    block.close()


@pytest.fixture
def shared_workers(_worker_processes: object) -> Iterator[object]:
    """Worker processes that tests share: their start takes seconds, and is tested in tests/engine.

    ``pytestmark = pytest.mark.usefixtures("shared_workers")`` lets all runs of a module with ``workers=2`` use them.
    """
    with _worker_processes:  # type: ignore[attr-defined]
        yield _worker_processes


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The instruction set that native kernels use during a test (`core.native.sets.in_each_set`)."""
    monkeypatch.setenv("HANSA_NATIVE", request.param)
    return str(request.param)
