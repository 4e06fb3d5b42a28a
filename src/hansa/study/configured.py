"""Run a configuration in Python, as ``hansa run`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, config_digest
from hansa.runs.folder import RunFolder
from hansa.runs.options import Callback, RunOptions
from hansa.runs.seed_group import SeedGroupFolder, config_without_seed
from hansa.study.api import progress_if, resume
from hansa.study.persisted_runs import run_to_end

if TYPE_CHECKING:
    from hansa.study.report.results import Runs


def run_config(
    config: Config,
    out: Path | str,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
) -> Run | Runs:
    """Run a configuration in a folder, or resume it there, and return the run; with several seeds `hansa.Runs`.

    Code that the configuration names is imported.

    Args:
        config: A configuration, as `hansa.config.load` and `hansa.config.from_yaml` return.
        out: The folder of the run, or of its seeds. An unfinished run of the same configuration is resumed.
        overwrite: Replace a run in ``out``; a different one is otherwise refused. Folders of seeds are never replaced.
        callbacks: Functions of (run, record), called after every round; a true result stops the run.
        progress: Whether to show a progress bar.

    >>> import tempfile
    >>> from hansa.config import from_yaml
    >>> config = from_yaml("rounds: 2\\ndata: {name: synthetic, clients: 4}\\nmodel: logistic\\nlocal: {steps: 1}")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(run_config(config, f"{folder}/run").history)
    2
    """
    group, folder = SeedGroupFolder(out), RunFolder(out)
    if config.seeds is not None:
        if not group.exists or config_without_seed(group.config) != config_without_seed(config):
            group.check()
        group.write_config(config)
        return resume(out, rounds=config.rounds, trust=True, callbacks=callbacks, progress=progress)
    if not folder.exists or overwrite:
        experiment = Experiment.new(config, out, overwrite=overwrite)
    elif config_digest(folder.config) == config_digest(config):
        experiment = Experiment.resume(out, rounds=config.rounds, workers=config.workers, trust=True)
    else:
        raise HansaError(f"{out}: holds a run of another configuration. overwrite=True replaces it.")
    with progress_if(progress) as display:
        return run_to_end(experiment, RunOptions(callbacks=callbacks), display, config.title)
