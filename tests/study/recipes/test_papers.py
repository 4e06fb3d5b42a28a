"""The recipes as they were compared with their papers: settings, published numbers and claims."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hansa.study.recipes import SCALES, library
from hansa.study.recipes.verdict import compare_with_paper

RECIPES = sorted(library())

DIGESTS: dict[str, str] = json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8"))
"""SHA-256 of the settings, published numbers, measures and claims of each recipe, as they were when they were compared
with the paper, cell by cell and rate by rate."""


@pytest.mark.parametrize("name", RECIPES)
def test_settings_numbers_and_claims_are_those_that_were_compared_with_the_paper(name: str) -> None:
    """Whoever changes a recipe compares it with its paper again, and then records the digest that the failure tells."""
    recipe = library()[name]
    cells = [[scale, cell.row, cell.column, cell.document] for scale in SCALES for cell in recipe.cells(scale)]
    seeds = [recipe.at(scale).seeds for scale in SCALES]
    published = [[cell.row, cell.column, cell.published] for cell in recipe.cells("paper")]
    measures = {name: measure.model_dump() for name, measure in recipe.measures.items()}
    claims = [claim.model_dump() for claim in recipe.claims]
    told = json.dumps([cells, seeds, published, measures, claims], sort_keys=True)
    assert hashlib.sha256(told.encode()).hexdigest() == DIGESTS[name]


def test_numbers_of_other_data_have_no_difference_and_no_target_of_the_paper() -> None:
    history = [{"round": r, "test_accuracy": 0.5 + r / 100, "simulated_seconds": 60.0} for r in range(1, 41)]
    checked = 0
    for name, recipe in library().items():
        measures = recipe.measured("cpu")
        if recipe.same_data("cpu"):
            assert measures == recipe.measures, name
            continue
        for measure in measures.values():
            if measure.target is not None:
                assert measure.target in recipe.at("cpu").targets.values(), name
        if not {measure.metric for measure in measures.values()} <= {"test_accuracy"}:
            continue
        cells = [(cell.row, cell.column) for cell in recipe.cells("cpu")]
        comparisons, _ = compare_with_paper(recipe, "cpu", dict.fromkeys(cells, [history] * 3))
        assert comparisons
        assert {one.difference for one in comparisons} == {None}, name
        checked += 1
    assert checked >= 5
    assert library()["afga-table-3"].same_data("cpu")  # Shakespeare, with a smaller network
    assert not library()["afga-table-1"].same_data("cpu")
    assert library()["cams-table-2"].measures["bits"].counted  # the same on any data
