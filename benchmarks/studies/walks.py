"""How much of the library one round passes through: functions, modules and calls from one package to another.

Traces ``hansa.run`` for one round with one worker, after the same round has run once, so that neither imports nor first
preparations count. Only functions in the library's own source files count. A lambda or comprehension belongs to the
function around it. The package of a module is the first component after ``hansa.``; a package inside another, such as
``hansa.core.native``, counts as one of its own. An edge is a pair of packages of which one calls into the other,
whatever is called between the two outside of the library.

Run: python benchmarks/studies/walks.py [--edges]
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import presets

SOURCE = Path(hansa.__file__).parent
SIZES = (9, 14, 6, 21, 12, 8, 17, 11)
WORK = {"local_lr": 0.1, "steps": 3, "batch_size": 4}
INNER = re.compile(r"(\.<locals>)?\.<(lambda|listcomp|setcomp|dictcomp|genexpr)>")


class Function(NamedTuple):
    """A function of the library."""

    package: str
    module: str
    name: str


class Native(nn.Module):
    """A user's model that native code trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Eager(nn.Module):
    """A user's model that PyTorch trains: native code has no tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


METHODS: dict[str, Callable[[], hansa.Algorithm]] = {
    "FedAvg": lambda: presets.fedavg(**WORK, participation=0.5),
    "FedCAMS, two-way": lambda: presets.fedcams(**WORK, participation=0.5, two_way=True),
    "CAFGA": lambda: presets.cafga(**WORK, clusters=2, reporters=1),
}


class Walk:
    """What was called while it watched, in all threads."""

    def __init__(self) -> None:
        self.functions: set[Function] = set()
        self.calls: set[tuple[Function, Function]] = set()
        self._known: dict[CodeType, Function | None] = {}

    def function(self, code: CodeType) -> Function | None:
        """The library's function that a code object is or lies in; None for all others."""
        if code not in self._known:
            self._known[code] = self._named(code)
        return self._known[code]

    def _named(self, code: CodeType) -> Function | None:
        path = Path(code.co_filename)
        name = INNER.sub("", code.co_qualname)
        if not path.is_relative_to(SOURCE) or name == "<module>":
            return None
        parts = path.relative_to(SOURCE).with_suffix("").parts
        package = ".".join(parts[:-1][:2]) or parts[0]
        return Function(package, ".".join(part for part in parts if part != "__init__") or "__init__", name)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        called = self.function(frame.f_code) if event == "call" else None
        if called is None:
            return
        self.functions.add(called)
        above = frame.f_back
        while above is not None and self.function(above.f_code) is None:
            above = above.f_back
        caller = None if above is None else self.function(above.f_code)
        if caller is not None and caller.package != called.package:
            self.calls.add((caller, called))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and all that are started meanwhile."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def modules(self) -> Counter[str]:
        """The modules, each with how many of its functions were called."""
        return Counter(function.module for function in self.functions)

    @property
    def edges(self) -> Counter[tuple[str, str]]:
        """Pairs of packages, each with how many pairs of functions call across."""
        return Counter((caller.package, called.package) for caller, called in self.calls)


def task(model: type[nn.Module]) -> hansa.Task:
    """A user's model on clients of unequal size, with a test set."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    inputs, labels = draw.standard_normal((len(owners), 10)).astype(np.float32), draw.integers(0, 3, len(owners))
    held = hansa.data.from_arrays(inputs, labels, clients=owners, test=(inputs[:20], labels[:20]))
    return hansa.Task(model, cross_entropy, held)


def walk(method: Callable[[], hansa.Algorithm], model: type[nn.Module]) -> Walk:
    """One round, traced when it runs for the second time."""
    problem, found = task(model), Walk()
    hansa.run(method(), problem, rounds=1, workers=1)
    algorithm, run = method(), hansa.run
    with found.watching():
        run(algorithm, problem, rounds=1, workers=1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", action="store_true", help="also list the pairs of packages")
    options = parser.parse_args()
    walks = {
        f"{name}, {model.__name__.lower()}": walk(method, model)
        for name, method in METHODS.items()
        for model in (Native, Eager)
    }
    print(f"One round of hansa {hansa.__version__}, one worker")
    print(f"{'':26}{'functions':>10}{'modules':>10}{'packages':>10}{'edges':>8}{'calls across':>14}")
    for name, found in walks.items():
        packages = {function.package for function in found.functions}
        counts = f"{len(found.functions):10}{len(found.modules):10}{len(packages):10}"
        print(f"{name:26}{counts}{len(found.edges):8}{len(found.calls):14}")
    for name, found in walks.items():
        print(f"\n{name}: modules, with the functions called in each")
        for module, count in sorted(found.modules.items()):
            print(f"  {module:34}{count:4}")
        if options.edges:
            print(f"{name}: edges, with the pairs of functions that call across")
            for (caller, called), count in sorted(found.edges.items()):
                print(f"  {caller:16} -> {called:16}{count:4}")


if __name__ == "__main__":
    main()
