"""What a run states about its metrics: which one ranks it, and in which direction each is better.

A task states it, the run folder records it, and every table, page and search reads it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hansa.runs.columns import ACCURACY, COLUMNS, OUTCOMES, SITE_PREFIX, direction_of, evaluated_metrics
from hansa.runs.folder_lock import COMPOSITION
from hansa.runs.store import io
from hansa.training.metric_direction import Direction


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """What a run recorded about its metrics, so that no code is needed to rank it.

    Args:
        main: The column that the run is ranked by; "" if it did not say.
        better: The direction of the task's own metrics by name, without prefixes such as ``test_``.
        chance: The accuracy of always predicting the most frequent test label; None if that is not known.
        validation: Whether there are validation rows, on which hyperparameters are scored.
    """

    main: str = ""
    better: Mapping[str, Direction] = field(default_factory=dict)
    chance: float | None = None
    validation: bool = False

    @property
    def tuning(self) -> str:
        """The column that hyperparameters are scored by: the main metric, on validation rows if there are any."""
        own = self.main.rpartition("/")[2]
        return f"{VALIDATION}/{own}" if self.validation and own.startswith("test_") else self.main

    @classmethod
    def of_task(cls, task: Any) -> MetricFacts:
        """Return the facts of a task."""
        return cls(
            getattr(task, "main_metric", ""),
            dict(getattr(task, "directions", {})),
            label_share(task),
            VALIDATION in getattr(task, "test_sets", ()),
        )

    @classmethod
    def from_json(cls, stored: Any) -> MetricFacts:
        """Read the facts from a run folder; unknown content is ignored."""
        if not isinstance(stored, Mapping):
            return cls()
        main, better, chance = stored.get("main"), stored.get("better"), stored.get("chance")
        known = better.items() if isinstance(better, Mapping) else ()
        directions: dict[str, Direction] = {str(n): d for n, d in known if d in ("higher", "lower")}
        share = chance if isinstance(chance, float) else None
        return cls(main if isinstance(main, str) else "", directions, share, stored.get("validation") is True)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return {
            "main": self.main,
            "better": dict(self.better),
            "chance": self.chance,
            "validation": self.validation,
        }


NO_FACTS = MetricFacts()
VALIDATION = "validation"
"""The name of the test set of validation rows, as in `hansa.training.seeded_clients`, which needs torch."""


def scores_test_rows(metric: str) -> str:
    """Return a sentence that warns of tuning on test rows; "" if the metric is measured on others.

    >>> scores_test_rows("validation/test_loss"), scores_test_rows("train_loss")
    ('', '')
    """
    if not metric.startswith(("test_", "client_", "personal_")):
        return ""
    return (
        f"scored by {metric}, on test rows: the best value is then biased. data.validation: 0.1, or in Python "
        "hansa.data.with_validation(data, 0.1), takes rows for tuning out of training."
    )


class RunHistory(list[dict[str, Any]]):
    """The records of a run, with what its task states about its metrics."""

    def __init__(self, records: Iterable[dict[str, Any]] = (), facts: MetricFacts = NO_FACTS) -> None:
        super().__init__(records)
        self.facts = facts


def read_facts(folder: Path) -> MetricFacts:
    """Return what a run folder records about its metrics; nothing in older folders."""
    if not (folder / COMPOSITION).is_file():
        return NO_FACTS
    stored: object = io.read_sealed(folder / COMPOSITION)
    return MetricFacts.from_json(stored.get("metrics") if isinstance(stored, Mapping) else None)


def facts_of(history: object) -> MetricFacts:
    """Return the facts that a history carries, if any."""
    facts = getattr(history, "facts", None)
    if facts is None:
        facts = getattr(history, "attrs", {}).get("facts")  # of a pandas frame
    return facts if isinstance(facts, MetricFacts) else NO_FACTS


def label_share(task: Any) -> float | None:
    """Return the share of the most frequent test label of a task, if its targets are class numbers."""
    import torch

    targets = getattr(getattr(task, "data", None), "test_targets", None)
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.ndim != 1:
        return None
    labels = targets[targets >= 0]
    return float(labels.bincount().max()) / len(labels) if len(labels) else None


def main_metric(names: Iterable[str], facts: MetricFacts = NO_FACTS) -> str:
    """Return the column that a run with these columns is ranked by.

    It is the one that its task states, of the server's test rows or else of the sites'; else accuracy, else the first
    own metric of which a direction is known, else a loss: of the test rows, of all training rows, or of the clients.

    >>> main_metric(["test_c_index", "test_loss"]), main_metric(["train_loss"])
    ('test_c_index', 'train_loss')
    >>> main_metric(["train_loss", "sites_test_loss"])
    'sites_test_loss'
    """
    known = set(names)
    for name in (facts.main, SITE_PREFIX + facts.main):
        if name in known:
            return name
    plain = {name for name in evaluated_metrics(known) if not name.endswith(("_worst", "_std"))}
    own = [name for name in sorted(plain) if name.startswith("test_") and name not in COLUMNS]
    at_sites = [name for name in sorted(plain) if name.startswith("sites_test_") and name != "sites_test_loss"]
    directed = [name for name in own if direction_of(name, facts.better)]
    directed_at_sites = [name for name in at_sites if direction_of(name, facts.better)]
    losses = ("test_loss", "sites_test_loss", *OUTCOMES)
    for name in (ACCURACY, *directed, "sites_test_accuracy", *directed_at_sites, *losses):
        if name in known:
            return name
    return ACCURACY
