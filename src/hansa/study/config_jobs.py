"""Runs of configurations in folders, as jobs of a study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hansa.config import Config
from hansa.core.devices import resolve_devices
from hansa.runs.experiment import Experiment, config_digest
from hansa.runs.folder import slug
from hansa.runs.run_cache import PlannedRun
from hansa.study.recipes.schedule import estimated_work
from hansa.study.report.progress import ProgressDisplay
from hansa.study.run_worker import JobStopped
from hansa.study.scheduler import choose_parallel
from hansa.training.execution_mode import describe_kernels


class ConfigJob(NamedTuple):
    """A planned run, with its name in the progress display."""

    planned: PlannedRun
    title: str

    @property
    def rounds(self) -> int:
        return self.planned.config.rounds

    @property
    def size(self) -> float:
        """Its estimated work."""
        return estimated_work(self.planned.config)

    def work(self, display: ProgressDisplay) -> str:
        """Execute the run unless it has finished before; return its folder."""
        each = self.planned.open()
        if not isinstance(each, Experiment):
            display.skip(each.config.rounds)
            return str(each.path)
        display.print_once(describe_kernels(each.run.task))
        each.execute([display.follow(self.title, each.config.rounds, each.run.state.round)])
        if each.rounds_left:
            raise JobStopped
        return str(each.folder.path)


def independent_waves(configs: Mapping[str, Config], *, overwrite: bool = False) -> list[dict[str, Config]]:
    """Split configurations into groups in which no two share a run folder.

    Configurations that differ only in rounds, say, continue each other's runs: they are run in their order.

    Args:
        configs: Configurations by name.
        overwrite: Whether folders are named after the configurations alone.

    >>> from hansa.config import from_yaml
    >>> short, long, other = (from_yaml(text) for text in ("rounds: 2", "rounds: 4", "local: {lr: 0.5}"))
    >>> [list(wave) for wave in independent_waves({"short": short, "long": long, "other": other})]
    [['short', 'other'], ['long']]
    """
    waves: list[dict[str, Config]] = []
    seen: dict[str, int] = {}
    for name, config in configs.items():
        key = slug(name)
        if not overwrite:
            grouped = config.model_copy(update={"seed": 0, "seeds": None}) if config.seeds is not None else config
            key = f"{config_digest(grouped)}{config.seeds is not None}"
        place = seen[key] = seen.get(key, -1) + 1
        if place == len(waves):
            waves.append({})
        waves[place][name] = config
    return waves


def choose_parallel_configs(parallel: int | None, jobs: int, configs: Mapping[str, Config], track: bool) -> int:
    """Return how many runs of some configurations may be under way at once.

    Args:
        parallel: The number that the user asks for; None chooses it.
        jobs: The number of runs.
        configs: The configurations by name.
        track: Whether runs are logged to trackers.
    """
    every = list(configs.values())
    workers = max((1 if each.workers == "auto" else each.workers for each in every), default=1)
    kinds = {device.type for each in every for device in resolve_devices(each.device)}
    obstacle = "trackers are called in this process" if track else ""
    for each in every:
        if each.engine.kind != "pool":
            obstacle = f"engine {each.engine.kind} uses other processes itself"
    return choose_parallel(parallel, jobs, workers, sorted(kinds), obstacle=obstacle)
