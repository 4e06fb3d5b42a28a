"""Several seeds of one method: a configuration for each, and a folder with one run folder for each.

=============  ==================================================================
group.yaml     the configuration with all its seeds; ``hansa run`` accepts it
seed-0/, ...   ordinary run folders
=============  ==================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from hansa.config import Config, code_names, load, to_yaml
from hansa.core.errors import HansaError, invalid_argument
from hansa.runs.folder import RunFolder
from hansa.runs.store import io
from hansa.runs.trust import remember, require_trust

GROUP = "group.yaml"


def parse_seeds(seeds: object, first: int = 0, where: str = "run") -> list[int]:
    """Return the seeds given by a list or a count; 3 means three seeds from ``first``.

    >>> parse_seeds(3), parse_seeds(2, first=7), parse_seeds([5, 1])
    ([0, 1, 2], [7, 8], [5, 1])
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds >= 1:
        return list(range(first, first + seeds))
    if isinstance(seeds, Iterable) and not isinstance(seeds, (str, bytes, Mapping)):
        listed = list(seeds)
        plain = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in listed)
        if listed and plain and len(set(listed)) == len(listed):
            return listed
    raise invalid_argument(
        where, "seeds", seeds, "a number of seeds, or a list of different integers", "3 stands for seeds 0, 1, 2."
    )


def expand_seeds(config: Config) -> list[Config]:
    """Return one configuration for each of its seeds; or the configuration itself if it has one seed.

    >>> from hansa.config import from_yaml
    >>> [each.seed for each in expand_seeds(from_yaml("seeds: [4, 2]"))]
    [4, 2]
    """
    if config.seeds is None:
        return [config]
    seeds = parse_seeds(config.seeds, config.seed, "config")
    return [config.model_copy(update={"seed": seed, "seeds": None}) for seed in seeds]


def config_without_seed(config: Config) -> str:
    """Return the text of a configuration without seed, name, workers and checkpoints."""
    left_out = {"seed", "seeds", "name", "workers", "checkpoint"}
    return json.dumps(config.model_dump(mode="json", exclude_defaults=True, exclude=left_out), sort_keys=True)


class SeedGroupFolder:
    """The folder of a method's seeds, existing or to be created."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.path = path.parent if path.name == GROUP and path.is_file() else path

    @classmethod
    def create_numbered(cls, path: Path) -> SeedGroupFolder:
        """Create a folder of this name, or of the next free one: name, name-2, name-3, ..."""
        io.make_folder(path.parent.absolute())
        for number in count(1):
            free = path if number == 1 else path.with_name(f"{path.name}-{number}")
            if io.create_folder(free.absolute()):
                return cls(free)
        raise AssertionError

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        """Whether a group has been started here."""
        return (self / GROUP).is_file()

    @property
    def config(self) -> Config:
        """The configuration with all its seeds as written; no code that it names is run."""
        if not self.exists:
            raise HansaError(f"{self}: not a folder of several seeds: {GROUP} is missing.")
        return load(self / GROUP, building=False)

    def require_trust(self, *, trust: bool = False) -> None:
        """Refuse a folder that names code unless it is on the list of this user's runs or ``trust`` is set."""
        require_trust(self.path, code_names(self.config), trust=trust)

    def run(self, seed: int) -> RunFolder:
        """Return the folder of a seed."""
        return RunFolder(self / f"seed-{seed}")

    @property
    def runs(self) -> list[RunFolder]:
        """The runs that have been started, in the order of the seeds."""
        return [run for run in (self.run(each.seed) for each in expand_seeds(self.config)) if run.exists]

    def check(self, *, overwrite: bool = False) -> None:
        """Refuse a folder with other content, or with runs unless ``overwrite``."""
        if not os.path.lexists(self.path) or (self.exists and overwrite):
            return
        if self.exists:
            raise HansaError(
                f"{self}: already holds runs. `hansa resume {self}` resumes them, --overwrite replaces them."
            )
        if not self.path.is_dir() or not all(name.startswith((".hansa", GROUP)) for name in os.listdir(self.path)):
            raise HansaError(f"{self}: not empty, and not a group of runs. Choose another folder.")

    def write_config(self, config: Config) -> None:
        """Write the configuration with its seeds, and with the earlier seeds if everything else is the same."""
        seeds = [each.seed for each in expand_seeds(config)]
        if self.exists and config_without_seed(self.config) == config_without_seed(config):
            seeds = sorted({*seeds, *(each.seed for each in expand_seeds(self.config))})
        io.make_folder(self.path.absolute())
        remember(self.path, code_names(config))
        io.write_file(self / GROUP, to_yaml(config.model_copy(update={"seed": 0, "seeds": seeds})).encode())
