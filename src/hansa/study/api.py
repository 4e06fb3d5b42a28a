"""What one asks for in Python: a run, several seeds of it, methods compared; in memory, or in folders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import torch

from hansa.algorithm import Algorithm
from hansa.core.devices import Device
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.engine import keep_workers
from hansa.rounds.faults import faults
from hansa.rounds.measures.base import Measure
from hansa.runs.driver import Callback, Run
from hansa.runs.driver import run as run_in_memory
from hansa.runs.store import ClientStore
from hansa.training import TaskLike, personalise

if TYPE_CHECKING:  # a run in memory needs none of these: folders, results and progress are imported where they are used
    from contextlib import AbstractContextManager

    from hansa.runs.search import Axis, Search
    from hansa.study.report.progress import Bars, Lines, Silence
    from hansa.study.report.results import Comparison, Runs

Shown: TypeAlias = "Bars | Lines | Silence | None"

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


class Place(NamedTuple):
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
    """Train ``task`` with ``algorithm`` for ``rounds`` rounds; with ``seeds``, several times, as `hansa.study.report.Runs`.

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
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> method = hansa.presets.fedavg(local_lr=0.5, steps=2)
    >>> one, two = (run(method, task, rounds=3, workers=workers) for workers in (1, 2))
    >>> torch.equal(one.params, two.params), len(one.history)
    (True, 3)
    """
    if not isinstance(algorithm, Algorithm):
        raise invalid_argument("run", "algorithm", algorithm, "an Algorithm", "hansa.presets.fedavg(...) makes one.")
    check_integer("run", "rounds", rounds)
    kept = None if out is None else Place(Path(out), name, overwrite, checkpoint_every)
    title = name if name is not None else algorithm.name
    with keep_workers() if seeds is not None else nullcontext(), _progress(progress) as shown:
        if seeds is None:
            return _run(algorithm, task, rounds, seed, kept, store, options, shown, title)
        if store is not None:
            raise invalid_argument("run", "store", store, "None with several seeds", "Each has a store of its own.")
        from hansa.runs.seed_group import seed_list

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
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> methods = {"FedAvg": hansa.presets.fedavg(steps=2), "FedAMS": hansa.presets.fedams(steps=2)}
    >>> len(compare(methods, task, rounds=2, seeds=2)["FedAMS"])
    2
    """
    from hansa.runs.folder import slug
    from hansa.runs.seed_group import seed_list
    from hansa.study.report.results import Comparison

    if not isinstance(methods, Mapping) or not all(isinstance(made, Algorithm) for made in methods.values()):
        raise invalid_argument(
            "compare", "methods", methods, "names and algorithms", '{"FedAvg": hansa.presets.fedavg(...)}.'
        )
    check_integer("compare", "rounds", rounds)
    places = {name: slug(name) for name in methods}
    if out is not None and len(set(places.values())) < len(places):
        raise HansaError(f"compare: folders {sorted(places.values())}: give methods names that differ as folders do.")
    found = {}
    with keep_workers(), _progress(progress) as shown:
        for name, algorithm in methods.items():
            kept = None if out is None else Place(Path(out) / places[name], name, overwrite, checkpoint_every)
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
    from hansa.runs.folder import slug
    from hansa.runs.search import Search
    from hansa.runs.seed_group import seed_list

    check_integer("search", "rounds", rounds)
    seed_of = seed_list(seeds, 0, "search")
    found = Search(axes, metric, seeds=len(seed_of), rounds=rounds, prune=prune, folder=out, facts={"task": task.name})
    with keep_workers(), _progress(progress) as shown:
        for asked in found.ask(trials):
            title = ", ".join(f"{name}={value!r}" for name, value in asked.point.items())
            watched: Options = {**options, "callbacks": [*options.get("callbacks", ()), asked]}
            algorithm, failed = make(**asked.point), False
            for seed in seed_of:
                kept = None
                if out is not None:
                    kept = Place(Path(out) / f"{slug(title)}-seed-{seed}", title, False, checkpoint_every)
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
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> import tempfile
    >>> method = hansa.presets.fedavg(steps=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = run(method, task, rounds=2, out=f"{folder}/run")
    ...     resume(f"{folder}/run", method, task, rounds=4).state.round
    4
    """
    from hansa.runs.experiment import Experiment
    from hansa.runs.folder import RunFolder
    from hansa.runs.seed_group import GroupFolder, per_seed
    from hansa.study import persisted_runs as kept_runs
    from hansa.study.report.results import Runs

    if (algorithm is None) != (task is None):
        raise HansaError(f"resume({str(folder)!r}): expected both an algorithm and a task, or neither.")
    if task is None and (foreign := sorted(set(options) - {"workers", "callbacks"})):
        raise HansaError(f"resume({str(folder)!r}): {', '.join(foreign)}: the folder's configuration says these.")

    def go_on(path: Path, shown: Shown, title: str) -> Run:
        make = None
        if algorithm is not None and task is not None:
            make = kept_runs.maker(algorithm, task, options)
        experiment = Experiment.resumed(
            path, rounds=rounds, workers=options.get("workers"), fallback=fallback, accept=accept, make=make
        )
        return kept_runs.go(experiment, options, shown, title)

    group = GroupFolder(folder)
    with keep_workers() if group.exists else nullcontext(), _progress(progress) as shown:
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
                made = Experiment.new(each, group.run(each.seed).path, make=kept_runs.maker(algorithm, task, options))
                found.append(kept_runs.go(made, options, shown, title))
            else:
                found.append(kept_runs.go(Experiment.new(each, group.run(each.seed).path), options, shown, title))
        return Runs(config.title, found)


def _runs(
    algorithm: Algorithm,
    task: TaskLike,
    rounds: int,
    seeds: Sequence[int],
    kept: Place | None,
    options: Options,
    shown: Shown,
    title: str,
) -> Runs:
    from hansa.runs.seed_group import GroupFolder
    from hansa.study import persisted_runs as kept_runs
    from hansa.study.report.results import Runs

    group = None if kept is None else GroupFolder(kept.path)
    if group is not None and kept is not None:
        config = kept_runs.described(algorithm, task, rounds, seeds[0], kept, options).model_copy(
            update={"seeds": list(seeds)}
        )
        if not group.exists:
            group.check()
        elif not kept.overwrite and kept_runs.seedless(group.config) != kept_runs.seedless(config):
            raise kept_runs.another(group)
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
    kept: Place | None,
    store: ClientStore | None,
    options: Options,
    shown: Shown,
    title: str,
) -> Run:
    if kept is None:
        callbacks = [*options.get("callbacks", ()), *_followed(shown, title, rounds)]
        given: dict[str, Any] = {**options, "callbacks": callbacks}
        return run_in_memory(algorithm, task, rounds=rounds, seed=seed, store=store, **given)
    from hansa.study import persisted_runs as kept_runs

    return kept_runs.run_kept(algorithm, task, rounds, seed, kept, store, options, shown, title)


def _progress(wanted: bool) -> AbstractContextManager[Shown]:
    if not wanted:
        return nullcontext()
    from hansa.study.report.progress import progress_of

    return progress_of(wanted)


def _followed(shown: Shown, title: str, rounds: int) -> list[Callback]:
    """What shows the progress of a run."""
    return [] if shown is None else [shown.follow(title, rounds)]
