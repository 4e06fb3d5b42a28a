"""Published tables and figures as data, and their comparison with measured numbers."""

from hansa.study.recipes.claims import ClaimCheck
from hansa.study.recipes.reading import read_measure
from hansa.study.recipes.recipe import (
    SCALES,
    PaperClaim,
    PublishedValue,
    Recipe,
    RecipeCell,
    RecipeMeasure,
    find_recipes,
    library,
    parse_published,
    read_recipes,
)
from hansa.study.recipes.verdict import CellComparison, agreement_rule, compare_with_paper

__all__ = [
    "SCALES",
    "CellComparison",
    "ClaimCheck",
    "PaperClaim",
    "PublishedValue",
    "Recipe",
    "RecipeCell",
    "RecipeMeasure",
    "agreement_rule",
    "compare_with_paper",
    "find_recipes",
    "library",
    "parse_published",
    "read_measure",
    "read_recipes",
]
