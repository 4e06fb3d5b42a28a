"""What one asks for in Python: a run, several seeds of it, methods compared; in memory, or in folders."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import torch

from hansa.algorithm import Algorithm
from hansa.citations import citations
from hansa.config import Config
from hansa.config.sections import CheckpointSection, EvaluateSection, PythonSection
from hansa.devices import Device, devices
from hansa.engine import choose, keep_workers
from hansa.errors import HansaError, refuse, whole
from hansa.measures.base import Measure
from hansa.report.progress import Bars, Lines, Silence, Stopper, progress_of
from hansa.report.results import Comparison, Runs
from hansa.rounds.faults import faults
from hansa.runs.driver import Callback, Run
from hansa.runs.driver import run as run_in_memory
from hansa.runs.experiment import Experiment, Maker, identity
from hansa.runs.folder import RunFolder, slug
from hansa.runs.group import GroupFolder, per_seed, seed_list
from hansa.runs.proposals import Axis, Search
from hansa.store import ClientStore
from hansa.tasks import TaskLike, personalise

log = logging.getLogger("hansa")


class Options(TypedDict, total=False):
    """What `run`, `compare` and `resume` pass on to every run, as `hansa.Run` has it."""

    dtype: torch.dtype | None
    device: Device | None
    workers: int | None
    quorum: int
    keep_params: bool
    evaluate_every: int
    callbacks: Sequence[Callback]
    faults: faults | None
    max_norm: float
    measures: Sequence[Measure]
    per_client: bool | int | None
    personalise: personalise | Mapping[str, Any] | None


class _Folder(NamedTuple):
    """How a run is kept."""

    path: Path
    name: str | None
    overwrite: bool
    checkpoint_every: int


@overload
def run(
    algorithm: Algorithm,
    task: TaskLike,
    *,
    rounds: int,
    seed: int = 0,
    seeds: None = None,
    out: Path | str | None = None,
    progress: bool = False,
    name: str | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 10,
    store: ClientStore | None = None,
    **options: Unpack[Options],
) -> Run: ...
@overload
def run(
    algorithm: Algorithm,
    task: TaskLike,
    *,
    rounds: int,
    seed: int = 0,
    seeds: int | Sequence[int],
    out: Path | str | None = None,
    progress: bool = False,
    name: str | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 10,
    store: None = None,
    **options: Unpack[Options],
) -> Runs: ...
def run(
    algorithm: Algorithm,
    task: TaskLike,
    *,
    rounds: int,
    seed: int = 0,
    seeds: int | Sequence[int] | None = None,
    out: Path | str | None = None,
    progress: bool = False,
    name: str | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 10,
    store: ClientStore | None = None,
    **options: Unpack[Options],
) -> Run | Runs:
    """Train ``task`` with ``algorithm`` for ``rounds`` rounds; with ``seeds``, several times, as `hansa.report.Runs`.

    Equal seeds give bit-identical results, whatever the number of ``workers``; None takes all cores when that pays.
    ``seeds=3`` stands for three from ``seed`` on, a list for those in it. ``progress`` shows a bar, or lines where
    there is no terminal.

    ``out`` keeps the run in a folder, with checkpoints every so many rounds: given again, a call with the same
    algorithm and task goes on where the run was, to the same bits, and a finished one is not repeated. Ctrl-C then
    stops after the round that is under way, with everything saved. Another run in that folder is refused;
    ``overwrite`` replaces it. Several seeds have a folder each below.

    Options: ``dtype`` float64 or float32 runs through everything; clients
    train on ``device``, or on those of a list in turn, by default the task's; fewer than ``quorum`` surviving updates
    leave a round without effect; an update longer than ``max_norm`` is refused; ``evaluate_every`` so many rounds;
    ``callbacks`` see every round and may stop the run; ``faults`` is a plan of clients that vanish or misbehave;
    ``measures`` adds numbers to each round's record, such as `hansa.measures.compression`; ``keep_params`` keeps the
    model after each round. Where test rows have owners, clients are evaluated one by one with each evaluation, or every
    ``per_client`` rounds, as they are and, with ``personalise={"steps": 5, "lr": 0.01}``, after such steps on their own
    rows; `Run.clients` has what came of it.

    >>> import torch
    >>> import hansa
    >>> task = hansa.tasks.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> method = hansa.presets.fedavg(local_lr=0.5, steps=2)
    >>> one, two = (run(method, task, rounds=3, workers=workers) for workers in (1, 2))
    >>> torch.equal(one.params, two.params), len(one.history)
    (True, 3)
    """
    if not isinstance(algorithm, Algorithm):
        raise refuse("run", "algorithm", algorithm, "an Algorithm", "hansa.presets.fedavg(...) makes one.")
    whole("run", "rounds", rounds)
    kept = None if out is None else _Folder(Path(out), name, overwrite, checkpoint_every)
    title = name if name is not None else algorithm.name
    with keep_workers() if seeds is not None else nullcontext(), progress_of(progress) as shown:
        if seeds is None:
            return _run(algorithm, task, rounds, seed, kept, store, options, shown, title)
        if store is not None:
            raise refuse("run", "store", store, "None with several seeds", "Each has a store of its own.")
        return _runs(algorithm, task, rounds, seed_list(seeds, seed), kept, options, shown, title)


def compare(
    methods: Mapping[str, Algorithm],
    task: TaskLike,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 1,
    out: Path | str | None = None,
    progress: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 10,
    **options: Unpack[Options],
) -> Comparison:
    """Train ``task`` with every method and every seed, as one result: means, deviations, a ranking, figures, a page.

    ``hansa.compare({"FedAvg": presets.fedavg(), "FedAMS": presets.fedams()}, task, rounds=40, seeds=3)``. With ``out``
    each method has a folder there, and runs that are finished are not repeated; the rest is as in `hansa.run`.

    >>> import torch
    >>> import hansa
    >>> task = hansa.tasks.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> methods = {"FedAvg": hansa.presets.fedavg(steps=2), "FedAMS": hansa.presets.fedams(steps=2)}
    >>> len(compare(methods, task, rounds=2, seeds=2)["FedAMS"])
    2
    """
    if not isinstance(methods, Mapping) or not all(isinstance(made, Algorithm) for made in methods.values()):
        raise refuse("compare", "methods", methods, "names and algorithms", '{"FedAvg": hansa.presets.fedavg(...)}.')
    whole("compare", "rounds", rounds)
    places = {name: slug(name) for name in methods}
    if out is not None and len(set(places.values())) < len(places):
        raise HansaError(f"compare: folders {sorted(places.values())}: give methods names that differ as folders do.")
    found = {}
    with keep_workers(), progress_of(progress) as shown:
        for name, algorithm in methods.items():
            kept = None if out is None else _Folder(Path(out) / places[name], name, overwrite, checkpoint_every)
            found[name] = _runs(algorithm, task, rounds, seed_list(seeds, 0, "compare"), kept, options, shown, name)
    return Comparison(found)


def search(
    make: Callable[..., Algorithm],
    task: TaskLike,
    axes: Mapping[str, Axis],
    *,
    rounds: int,
    trials: int = 20,
    metric: str = "test_accuracy",
    seeds: int | Sequence[int] = 1,
    prune: bool = True,
    out: Path | str | None = None,
    progress: bool = False,
    checkpoint_every: int = 10,
    **options: Unpack[Options],
) -> Search:
    """Look for the arguments of ``make``, a function that gives an algorithm, with which ``metric`` is best.

    ``hansa.search(presets.fedams, task, {"local_lr": hansa.between(1e-3, 1, log=True), "steps": [5, 10]}, rounds=40)``:
    an axis is a range or a list of values. Every trial is run with all ``seeds`` and valued by the mean over them of
    the metric's last five; ``prune`` ends early those that lag behind the median. The answer has ``best`` and
    ``trials``. With ``out`` the same call goes on where a search was. Needs the extra ``optuna``.
    """
    whole("search", "rounds", rounds)
    seed_of = seed_list(seeds, 0, "search")
    found = Search(axes, metric, seeds=len(seed_of), rounds=rounds, prune=prune, folder=out, facts={"task": task.name})
    with keep_workers(), progress_of(progress) as shown:
        for asked in found.ask(trials):
            title = ", ".join(f"{name}={value!r}" for name, value in asked.point.items())
            watched: Options = {**options, "callbacks": [*options.get("callbacks", ()), asked]}
            algorithm, failed = make(**asked.point), False
            for seed in seed_of:
                kept = None
                if out is not None:
                    kept = _Folder(Path(out) / f"{slug(title)}-seed-{seed}", title, False, checkpoint_every)
                asked.next_seed()
                try:
                    asked.take(_run(algorithm, task, rounds, seed, kept, None, watched, shown, title).history)
                except HansaError as error:  # a rate at which nothing was admitted is worth no run
                    log.warning("trial %d, %s: %s", asked.trial.number, title, error)
                    failed = True
                if failed or asked.hopeless:
                    break
            asked.tell(failed=failed)
    return found


def resume(
    folder: Path | str,
    algorithm: Algorithm | None = None,
    task: TaskLike | None = None,
    *,
    rounds: int | None = None,
    fallback: bool = False,
    accept: Sequence[str] = (),
    progress: bool = False,
    **options: Unpack[Options],
) -> Run | Runs:
    """Go on with the run of a folder, or with its seeds, exactly where it was, to its last round or to another.

    A run that was begun in Python needs the ``algorithm`` and ``task`` that it was begun with, and the same options;
    one of the command line brings its own. Data, model and code that changed since are refused unless ``accept`` names
    them.

    >>> import torch
    >>> import hansa
    >>> task = hansa.tasks.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> import tempfile
    >>> method = hansa.presets.fedavg(steps=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = run(method, task, rounds=2, out=f"{folder}/run")
    ...     resume(f"{folder}/run", method, task, rounds=4).state.round
    4
    """
    if (algorithm is None) != (task is None):
        raise HansaError(f"resume({str(folder)!r}): expected both an algorithm and a task, or neither.")
    if task is None and (foreign := sorted(set(options) - {"workers", "callbacks"})):
        raise HansaError(f"resume({str(folder)!r}): {', '.join(foreign)}: the folder's configuration says these.")

    def go_on(path: Path, shown: Bars | Lines | Silence, title: str) -> Run:
        make = None
        if algorithm is not None and task is not None:
            make = _maker(algorithm, task, options)
        experiment = Experiment.resumed(
            path, rounds=rounds, workers=options.get("workers"), fallback=fallback, accept=accept, make=make
        )
        return _go(experiment, options, shown, title)

    group = GroupFolder(folder)
    with keep_workers() if group.exists else nullcontext(), progress_of(progress) as shown:
        if not group.exists:
            config = RunFolder.holding(folder).config
            return go_on(Path(folder), shown, config.title)
        config = group.config
        if rounds is not None:
            config = config.model_copy(update={"rounds": rounds})
            group.write_config(config)
        found = []
        for each in per_seed(config):
            title = f"{config.title}, seed {each.seed}"
            if group.run(each.seed).exists:
                found.append(go_on(group.run(each.seed).path, shown, title))
            elif algorithm is not None and task is not None:
                made = Experiment.new(each, group.run(each.seed).path, make=_maker(algorithm, task, options))
                found.append(_go(made, options, shown, title))
            else:
                found.append(_go(Experiment.new(each, group.run(each.seed).path), options, shown, title))
        return Runs(config.title, found)


def _runs(
    algorithm: Algorithm,
    task: TaskLike,
    rounds: int,
    seeds: Sequence[int],
    kept: _Folder | None,
    options: Options,
    shown: Bars | Lines | Silence,
    title: str,
) -> Runs:
    group = None if kept is None else GroupFolder(kept.path)
    if group is not None and kept is not None:
        config = _described(algorithm, task, rounds, seeds[0], kept, options).model_copy(update={"seeds": list(seeds)})
        if not group.exists:
            group.check()
        elif not kept.overwrite and _seedless(group.config) != _seedless(config):
            raise _another(group)
        group.write_config(config)
    found = []
    for seed in seeds:
        place = None if group is None or kept is None else kept._replace(path=group.run(seed).path)
        told = title if len(seeds) == 1 else f"{title}, seed {seed}"
        found.append(_run(algorithm, task, rounds, seed, place, None, options, shown, told))
    return Runs(title, found)


def _run(
    algorithm: Algorithm,
    task: TaskLike,
    rounds: int,
    seed: int,
    kept: _Folder | None,
    store: ClientStore | None,
    options: Options,
    shown: Bars | Lines | Silence,
    title: str,
) -> Run:
    if kept is None:
        callbacks = [*options.get("callbacks", ()), shown.follow(title, rounds)]
        given: dict[str, Any] = {**options, "callbacks": callbacks}
        return run_in_memory(algorithm, task, rounds=rounds, seed=seed, store=store, **given)
    if store is not None:
        raise refuse("run", "store", store, "None with out", "The run's folder has the clients' rows.")
    config = _described(algorithm, task, rounds, seed, kept, options)
    make = _maker(algorithm, task, options)
    folder = RunFolder(kept.path)
    if not folder.exists or kept.overwrite:
        return _go(Experiment.new(config, kept.path, overwrite=kept.overwrite, make=make), options, shown, title)
    if identity(folder.config) != identity(config):
        raise _another(folder)
    if folder.config.rounds > rounds and int(folder.summary["rounds"]) > rounds:
        raise HansaError(f"{folder}: holds {folder.summary['rounds']} rounds of this run already; asked for {rounds}.")
    again = Experiment.resumed(kept.path, rounds=rounds, workers=options.get("workers"), make=make)
    return _go(again, options, shown, title)


def _go(experiment: Experiment, options: Options, shown: Bars | Lines | Silence, title: str) -> Run:
    """Run to the end; after a Ctrl-C, which let the round end and saved everything, interrupt the caller too."""
    follow = shown.follow(title, experiment.config.rounds, experiment.run.state.round)
    with Stopper(None, (signal.SIGINT,)) as stopper:
        experiment.go([follow, stopper], first=options.get("callbacks", ()))
    if stopper.caught is not None:
        raise KeyboardInterrupt(f"saved: hansa.resume({str(experiment.folder)!r}) goes on.")
    return experiment.run


def _maker(algorithm: Algorithm, task: TaskLike, options: Options) -> Maker:
    """How a folder's run is made of what Python has."""
    given: dict[str, Any] = {key: value for key, value in options.items() if key not in ("workers", "callbacks")}

    def make(config: Config, store: ClientStore | None, done: int) -> Run:
        where = devices(options.get("device") or getattr(task, "device", None) or "cpu")
        engine = choose(options.get("workers"), config.rounds - done, devices=where)
        return Run(algorithm, task, seed=config.seed, store=store, engine=engine, **given)

    return make


def _described(algorithm: Algorithm, task: TaskLike, rounds: int, seed: int, kept: _Folder, options: Options) -> Config:
    """What a folder says of a run that was made in Python."""
    watching = (
        "workers", "callbacks", "evaluate_every", "keep_params", "measures", "device", "per_client", "personalise",
    )  # fmt: skip
    told = {key: _printed(value) for key, value in options.items() if key not in watching}
    where = devices(options.get("device") or getattr(task, "device", None) or "cpu")
    return Config(
        name=kept.name if kept.name is not None else algorithm.name,
        seed=seed,
        rounds=rounds,
        device=[str(each) for each in where] if len(where) > 1 else str(where[0]),
        evaluate=EvaluateSection(every=options.get("evaluate_every", 1)),
        checkpoint=CheckpointSection(every=kept.checkpoint_every),
        python=PythonSection(
            algorithm=_printed(algorithm), task=task.name, options=told, cites=list(citations(algorithm))
        ),
    )


def _seedless(config: Config) -> str:
    return identity(config.model_copy(update={"seed": 0, "seeds": None}))


def _another(folder: RunFolder | GroupFolder) -> HansaError:
    return HansaError(
        f"{folder}: holds a run of another method, task, seed or option. Choose another folder; overwrite=True "
        "replaces it."
    )


def _printed(value: object) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
