"""Several seeds of one method: the configurations they stand for, and their folder, in which each is a run of its own.

=============  ==================================================================
group.yaml     the configuration with all its seeds; ``hansa run`` accepts it
seed-0/, ...   an ordinary run each, which can be resumed and shown by itself
=============  ==================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hansa.config import Config, load, to_text
from hansa.core.errors import HansaError, invalid_argument
from hansa.runs.folder import RunFolder
from hansa.runs.store import io

GROUP = "group.yaml"


def seed_list(seeds: object, first: int = 0, where: str = "run") -> list[int]:
    """The seeds that a number or a list of them means: 3 is three of them from ``first`` on.

    >>> seed_list(3), seed_list(2, first=7), seed_list([5, 1])
    ([0, 1, 2], [7, 8], [5, 1])
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds >= 1:
        return list(range(first, first + seeds))
    if isinstance(seeds, Iterable) and not isinstance(seeds, (str, bytes, Mapping)):
        found = list(seeds)
        plain = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in found)
        if found and plain and len(set(found)) == len(found):
            return found
    raise invalid_argument(
        where, "seeds", seeds, "how many, or a list of different whole numbers", "3 stands for seeds 0, 1, 2."
    )


def per_seed(config: Config) -> list[Config]:
    """The configurations that one with ``seeds`` stands for, each with a seed of its own; else itself.

    >>> from hansa.config import from_text
    >>> [each.seed for each in per_seed(from_text("seeds: [4, 2]"))]
    [4, 2]
    """
    if config.seeds is None:
        return [config]
    seeds = seed_list(config.seeds, config.seed, "config")
    return [config.model_copy(update={"seed": seed, "seeds": None}) for seed in seeds]


def grouped(items: Sequence[Any], config_of: Callable[[Any], Config | None]) -> list[list[Any]]:
    """Items apart by all that is in their configurations but the seed, in the order in which each first came.

    Two of equal seed are never of one group, and what has no configuration stands alone.
    """
    groups: list[tuple[str | None, set[int], list[Any]]] = []
    for item in items:
        config = config_of(item)
        label = None if config is None else same_but_for_seed(config)
        for known, seeds, members in groups:
            if config is not None and label == known and config.seed not in seeds:
                seeds.add(config.seed)
                members.append(item)
                break
        else:
            groups.append((label, set() if config is None else {config.seed}, [item]))
    return [members for *_, members in groups]


def same_but_for_seed(config: Config) -> str:
    """A text that configurations share when they differ in seed, name, workers and checkpoints at most."""
    left_out = {"seed", "seeds", "name", "workers", "checkpoint"}
    return json.dumps(config.model_dump(mode="json", exclude_defaults=True, exclude=left_out), sort_keys=True)


class GroupFolder:
    """The folder of a method's seeds, there or yet to be made."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.path = path.parent if path.name == GROUP and path.is_file() else path

    @classmethod
    def numbered(cls, path: Path) -> GroupFolder:
        """A new folder of this name, or of the next free one: name, name-2, name-3, ..."""
        io.make_folder(path.parent.absolute())
        for number in count(1):
            taken = path if number == 1 else path.with_name(f"{path.name}-{number}")
            if io.take_folder(taken.absolute()):
                return cls(taken)
        raise AssertionError

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        """Whether a group has been begun here."""
        return (self / GROUP).is_file()

    @property
    def config(self) -> Config:
        """The configuration with all its seeds, as it was written: no code is run that it names."""
        if not self.exists:
            raise HansaError(f"{self}: no runs of several seeds here, for there is no {GROUP}.")
        return load(self / GROUP, building=False)

    def run(self, seed: int) -> RunFolder:
        """The folder of a seed."""
        return RunFolder(self / f"seed-{seed}")

    @property
    def runs(self) -> list[RunFolder]:
        """The runs that have been begun, in the order of the seeds."""
        return [run for run in (self.run(each.seed) for each in per_seed(self.config)) if run.exists]

    def check(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that holds something else, or runs already that are not to be overwritten."""
        if not os.path.lexists(self.path) or (self.exists and overwrite):
            return
        if self.exists:
            raise HansaError(
                f"{self}: holds runs already. `hansa resume {self}` goes on with them, --overwrite starts anew."
            )
        if not self.path.is_dir() or any(os.scandir(self.path)):
            raise HansaError(f"{self}: holds something that is not a group of runs. Choose another folder.")

    def write_config(self, config: Config) -> None:
        """Write down which seeds there are to be; those of before stay among them where all else is the same."""
        seeds = [each.seed for each in per_seed(config)]
        if self.exists and same_but_for_seed(self.config) == same_but_for_seed(config):
            seeds = sorted({*seeds, *(each.seed for each in per_seed(self.config))})
        io.make_folder(self.path.absolute())
        io.write_file(self / GROUP, to_text(config.model_copy(update={"seed": 0, "seeds": seeds})).encode())
