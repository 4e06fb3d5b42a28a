"""The Python interface: run an algorithm, compare methods, search hyperparameters, resume runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.engine import auto_engine
from hansa.runs.columns import WINDOW, scores_test_rows
from hansa.runs.driver import Callback, Run, RunOptions, RunOptionsDict, device_names
from hansa.runs.store import ClientStore
from hansa.training import TaskLike

if TYPE_CHECKING:  # not needed by a run in memory: functions import folders, results and progress
    from hansa.config import Config
    from hansa.runs.folder import IfExists
    from hansa.runs.search import Axis, Search
    from hansa.study.report.results import Comparison, Runs
    from hansa.study.session import Job

log = logging.getLogger("hansa")


class RunCall(RunOptionsDict, total=False):
    """The keyword arguments of `run` except seeds, for type checkers."""

    seed: int | None
    out: Path | str | None
    progress: bool
    name: str | None
    overwrite: bool
    accept: Sequence[str]
    checkpoint_every: int
    store: ClientStore | None
    parallel: int | None


@overload
def run(
    algorithm: Algorithm, task: TaskLike, *, rounds: int, seeds: None = None, **options: Unpack[RunCall]
) -> Run: ...
@overload
def run(
    algorithm: Algorithm, task: TaskLike, *, rounds: int, seeds: int | Sequence[int], **options: Unpack[RunCall]
) -> Runs: ...
def run(
    algorithm: Algorithm,
    task: TaskLike,
    *,
    rounds: int,
    seed: int | None = None,
    seeds: int | Sequence[int] | None = None,
    out: Path | str | None = None,
    progress: bool = False,
    name: str | None = None,
    overwrite: bool = False,
    accept: Sequence[str] = (),
    checkpoint_every: int = 10,
    store: ClientStore | None = None,
    parallel: int | None = None,
    **options: Unpack[RunOptionsDict],
) -> Run | Runs:
    """Train ``task`` with ``algorithm`` for ``rounds`` rounds; with ``seeds`` once per seed.

    Results are a function of the seed: equal seeds give bit-identical results for any number of workers. With ``out``,
    calling it again resumes an unfinished run exactly and does not repeat a finished one; Ctrl-C ends the run after the
    current round, with everything saved.

    Args:
        algorithm: A preset or a custom composition.
        task: The model, the loss and the clients' data.
        rounds: The number of communication rounds.
        seed: The seed of all randomness; 0 by default.
        seeds: Run several seeds: how many, counted from ``seed``, or a list, which excludes ``seed``. The result is
            then `hansa.Runs`.
        out: A folder for the run, its checkpoints and its metrics; each of several seeds has a folder below it.
        progress: Whether to show a progress bar, or lines where there is no terminal.
        name: The title of the run in tables and reports; by default the algorithm's.
        overwrite: Replace a different run in ``out``, which is otherwise refused.
        accept: Kinds of changes to accept when the run in ``out`` is continued, as in `hansa.resume`.
        checkpoint_every: Rounds between checkpoints in ``out``.
        store: Where client memory is kept, for a run without ``out``.
        parallel: The number of seeds that run in parallel, in worker processes; None uses all cores if forks are safe.
        dtype: ``torch.float32`` or ``torch.float64`` for all arithmetic; by default the task's.
        device: Where clients train: a device, or a list of which each worker takes one; by default the task's.
        deterministic: Whether accelerators use deterministic algorithms only, the default; an operation without one is
            then an error. CPU results are always deterministic.
        server_device: Where the server aggregates and steps; by default the CPU.
        workers: The number of workers; None uses all cores when that is faster.
        quorum: The minimum number of accepted updates; with fewer a round does not change the model.
        keep_params: Whether to keep the model of every round, for ``Run.trajectory``.
        keep_best: A metric: ``Run.model`` and the model that is saved are those of the round in which it was best.
        evaluate_every: Rounds between evaluations; 0 evaluates after the last round only.
        callbacks: Functions of (run, record), called after every round; a true result stops the run.
        faults: A plan of clients that drop out or misbehave, `hansa.faults`.
        max_norm: Updates with a larger norm are refused.
        measures: Additional measurements for each round's record, such as `hansa.measures.compression`.
        per_client: Whether to evaluate every client on its own test rows, or the rounds between these evaluations; by
            default with each evaluation if test rows have owners. ``Run.clients`` has the results.
        personalise: Steps on its own training rows that a client takes before a second evaluation:
            ``{"steps": 5, "lr": 0.01}``.
        profile: Speeds of the clients' devices on the virtual clock, such as `hansa.pace.devices`.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> method = hansa.presets.fedavg(local_lr=0.5, steps=2)
    >>> one, two = (run(method, task, rounds=3, workers=workers) for workers in (1, 2))
    >>> torch.equal(one.params, two.params), len(one.history)
    (True, 3)
    """
    if not isinstance(algorithm, Algorithm):
        raise invalid_argument("run", "algorithm", algorithm, "an Algorithm", "hansa.presets.fedavg(...) makes one.")
    check_integer("run", "rounds", rounds)
    run_options = RunOptions(**options)
    if store is not None and (out is not None or seeds is not None):
        hint = "Each seed has its own store." if out is None else "The run's folder holds client memory."
        raise invalid_argument("run", "store", store, "None with out or several seeds", hint)
    if seeds is None and parallel is not None:
        raise invalid_argument("run", "parallel", parallel, "None for one seed", "workers=N uses N cores.")
    if seed is not None and seeds is not None and not isinstance(seeds, int):
        raise invalid_argument("run", "seed", seed, "none beside a list of seeds", f"The list is {list(seeds)}.")
    first_seed = 0 if seed is None else seed
    if seeds is None and out is None and not progress:
        engine = auto_engine(run_options.workers, rounds, devices=run_options.resolve_devices(task))
        new_run = Run(algorithm, task, seed=first_seed, store=store, engine=engine, options=run_options)
        return new_run.advance(rounds, run_options.callbacks)
    from hansa.runs.experiment import PythonRun
    from hansa.runs.folder import parse_seeds
    from hansa.study.report.results import Runs
    from hansa.study.session import Session, plan_jobs

    python = PythonRun(algorithm, task, run_options)
    seed_list = None if seeds is None else parse_seeds(seeds, first_seed)
    config = python.describe(rounds, first_seed, seed_list, name=name, checkpoint_every=checkpoint_every)
    open_options: dict[str, Any] = {"store": store} if out is None else {"rounds": rounds, "accept": accept}
    with Session(progress, saved=out is not None) as session:
        jobs = plan_jobs(config, out, "replace" if overwrite else "resume", python=python, **open_options)
        session.run_jobs(jobs, parallel)
        return jobs[0].run if seed_list is None else Runs(config.title, [job.run for job in jobs])


def compare(
    methods: Mapping[str, Algorithm],
    task: TaskLike,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 1,
    out: Path | str | None = None,
    progress: bool = False,
    overwrite: bool | Sequence[str] = False,
    accept: Sequence[str] = (),
    checkpoint_every: int = 10,
    parallel: int | None = None,
    **options: Unpack[RunOptionsDict],
) -> Comparison:
    """Train ``task`` with every method and every seed, and return one result: means, deviations, ranking, figures.

    ``hansa.compare({"FedAvg": presets.fedavg(), "FedAMS": presets.fedams()}, task, rounds=40, seeds=3)``

    Args:
        methods: Algorithms by name.
        task: The model, the loss and the clients' data.
        rounds: The number of communication rounds of every run.
        seeds: How many seeds from 0, or a list of them.
        out: A folder in which every method has a folder; finished runs are not repeated.
        progress: Whether to show a progress bar.
        overwrite: Replace different runs in ``out``, which are otherwise refused; or the names of the methods to run
            again.
        accept: Kinds of changes to accept when the runs in ``out`` are continued, as in `hansa.resume`.
        checkpoint_every: Rounds between checkpoints in ``out``.
        parallel: The number of parallel runs, in worker processes; None uses all cores if forks are safe. Results do
            not depend on it.
        options: Further options of every run, as in `hansa.run`.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> methods = {"FedAvg": hansa.presets.fedavg(steps=2), "FedAMS": hansa.presets.fedams(steps=2)}
    >>> len(compare(methods, task, rounds=2, seeds=2)["FedAMS"])
    2
    """
    from hansa.runs.experiment import PythonRun
    from hansa.runs.folder import parse_seeds, slug
    from hansa.study.report.results import Comparison, Runs
    from hansa.study.session import Session, plan_jobs

    if not isinstance(methods, Mapping) or not all(isinstance(method, Algorithm) for method in methods.values()):
        raise invalid_argument(
            "compare", "methods", methods, "names and algorithms", '{"FedAvg": hansa.presets.fedavg(...)}.'
        )
    check_integer("compare", "rounds", rounds)
    slugs = {name: slug(name) for name in methods}
    if out is not None and len(set(slugs.values())) < len(slugs):
        raise HansaError(f"compare: two methods have the same folder name in {sorted(slugs.values())}. Rename one.")
    replaced = [*methods] if overwrite is True else [] if overwrite is False else list(overwrite)
    if unknown := [name for name in replaced if name not in methods]:
        raise invalid_argument("compare", "overwrite", unknown[0], f"names among {', '.join(methods)}")
    all_seeds, run_options = parse_seeds(seeds, 0, "compare"), RunOptions(**options)
    jobs: list[Job] = []
    with Session(progress, saved=out is not None) as session:
        for name, algorithm in methods.items():
            python = PythonRun(algorithm, task, run_options)
            config = python.describe(rounds, seeds=all_seeds, name=name, checkpoint_every=checkpoint_every)
            folder = None if out is None else Path(out) / slugs[name]
            if_exists: IfExists = "replace" if name in replaced else "resume"
            jobs += plan_jobs(config, folder, if_exists, python=python, rounds=rounds, accept=accept)
        session.run_jobs(jobs, parallel)
        runs = iter([job.run for job in jobs])
        return Comparison({name: Runs(name, [next(runs) for _ in all_seeds]) for name in methods})


def search(
    factory: Callable[..., Algorithm],
    task: TaskLike,
    axes: Mapping[str, Axis],
    *,
    rounds: int,
    trials: int = 20,
    metric: str | None = None,
    window: int = WINDOW,
    seeds: int | Sequence[int] = 1,
    prune: bool = True,
    out: Path | str | None = None,
    progress: bool = False,
    checkpoint_every: int = 10,
    parallel: int | None = None,
    **options: Unpack[RunOptionsDict],
) -> Search:
    """Search for the arguments of ``factory`` that optimize ``metric``. Needs the extra ``optuna``.

    ``hansa.search(presets.fedams, task, {"local_lr": hansa.search_range(1e-3, 1), "steps": [5, 10]}, rounds=40)``

    A trial runs with all seeds; its value is the mean over seeds of the metric's score: the mean of its last ``window``
    values, or the final one if there are no more than these. The result has ``best`` and ``trials``.

    Args:
        factory: A function that returns an algorithm, such as a preset.
        task: The model, the loss and the clients' data.
        axes: For each argument a list of values, or `hansa.search_range` for a range.
        rounds: The number of communication rounds of every run.
        trials: The number of points to try.
        metric: A column of the history, or COLUMN:lower if its direction is unknown; by default the task's main metric,
            on its validation rows if it has any (`hansa.data.with_validation`).
        window: How many of the last measurements a score averages.
        seeds: How many seeds from 0, or a list of them.
        prune: Whether to stop trials that are worse than the median of the previous trials.
        out: A folder for the trials; the same call resumes an interrupted search.
        progress: Whether to show a progress bar.
        checkpoint_every: Rounds between checkpoints in ``out``.
        parallel: The number of seeds of a trial that run in parallel, if trials are not pruned; trials are sequential,
            since each depends on the previous ones. None uses all cores if forks are safe.
        options: Further options of every run, as in `hansa.run`.
    """
    from hansa.runs.experiment import PythonRun
    from hansa.runs.folder import parse_seeds, slug
    from hansa.runs.search import Search
    from hansa.study.session import Session, plan_jobs

    check_integer("search", "rounds", rounds)
    all_seeds, run_options = parse_seeds(seeds, 0, "search"), RunOptions(**options)
    settings: dict[str, Any] = {"rounds": rounds, "prune": prune, "window": window, "facts": {"task": task.name}}
    study = Search(axes, metric, task=task, seeds=len(all_seeds), folder=out, **settings)
    if warning := scores_test_rows(study.metric):
        log.warning("search: %s", warning)

    def plan(point: Mapping[str, Any]) -> list[Job]:
        python = PythonRun(factory(**point), task, run_options)
        title = ", ".join(f"{name}={value!r}" for name, value in point.items())
        config = python.describe(rounds, seeds=all_seeds, name=title, checkpoint_every=checkpoint_every)
        folder = None if out is None else Path(out) / slug(title)
        return plan_jobs(config, folder, "resume", python=python, rounds=rounds)

    with Session(progress, saved=out is not None) as session:
        session.run_trials(study, trials, plan, parallel)
    return study


RESUMABLE = {"workers", "callbacks", "device", "server_device", "deterministic"}
"""The options that may differ when the run of a configuration is resumed."""


def resume(
    folder: Path | str,
    algorithm: Algorithm | None = None,
    task: TaskLike | None = None,
    *,
    rounds: int | None = None,
    fallback: bool = False,
    accept: Sequence[str] = (),
    trust: bool = False,
    progress: bool = False,
    parallel: int | None = None,
    **options: Unpack[RunOptionsDict],
) -> Run | Runs:
    """Resume the run in a folder, or its seeds, exactly where it stopped.

    Args:
        folder: The folder of a run, or of several seeds.
        algorithm: The algorithm of a run started in Python.
        task: The task of a run started in Python.
        rounds: A new last round; by default that of the run.
        fallback: Use the newest undamaged checkpoint if a newer one is damaged.
        accept: Kinds of changes to accept: data, partition, augment, model, loss, metric, method, version. Others are
            refused; accepted ones are recorded in the folder.
        trust: Import code that the folder names even if this user did not create the folder on this machine.
        progress: Whether to show a progress bar.
        parallel: The number of seeds that run in parallel, as in `hansa.run`.
        options: The options that the run was started with, as in `hansa.run`; ``workers``, ``callbacks``, ``device``,
            ``server_device`` and ``deterministic`` may differ.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> import tempfile
    >>> method = hansa.presets.fedavg(steps=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = run(method, task, rounds=2, out=f"{folder}/run")
    ...     resume(f"{folder}/run", method, task, rounds=4).state.round
    4
    """
    from hansa.runs.experiment import PythonRun
    from hansa.study.session import Session, plan_jobs

    if (algorithm is None) != (task is None):
        raise HansaError(f"resume({str(folder)!r}): expected both an algorithm and a task, or neither.")
    if task is None and (foreign := sorted(set(options) - RESUMABLE)):
        raise HansaError(f"resume({str(folder)!r}): {', '.join(foreign)}: the folder's configuration sets these.")
    run_options = RunOptions(**options)
    python = None if algorithm is None or task is None else PythonRun(algorithm, task, run_options)
    with Session(progress) as session:
        jobs = plan_jobs(
            None, folder, python=python, callbacks=run_options.callbacks, trust=trust, fallback=fallback, accept=accept,
            rounds=rounds, workers=run_options.workers, deterministic=run_options.deterministic,
            device=None if run_options.device is None else device_names(run_options.device),
            server_device=None if run_options.server_device is None else str(run_options.server_device),
        )  # fmt: skip
        session.run_jobs(jobs, parallel)
        return _runs_of(jobs)


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
        overwrite: Replace the runs in ``out``; different ones are otherwise refused.
        callbacks: Functions of (run, record), called after every round; a true result stops the run.
        progress: Whether to show a progress bar.

    >>> import tempfile
    >>> from hansa.config import from_yaml
    >>> config = from_yaml("rounds: 2\\ndata: {name: synthetic, clients: 4}\\nmodel: logistic\\nlocal: {steps: 1}")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(run_config(config, f"{folder}/run").history)
    2
    """
    from hansa.study.session import Session, plan_jobs

    with Session(progress) as session:
        if_exists: IfExists = "replace" if overwrite else "resume"
        jobs = plan_jobs(config, out, if_exists, callbacks=callbacks, rounds=config.rounds)
        session.run_jobs(jobs)
        return _runs_of(jobs)


def _runs_of(jobs: Sequence[Job]) -> Run | Runs:
    """Return the run, or the runs of all seeds."""
    from hansa.study.report.results import Runs

    return jobs[0].run if jobs[0].group is None else Runs(jobs[0].config.title, [job.run for job in jobs])
