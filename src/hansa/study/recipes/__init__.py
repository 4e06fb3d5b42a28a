"""Published tables and figures as data, and their comparison with measured numbers."""

from hansa.study.recipes.recipe import SCALES, Recipe, RecipeMeasure, find_recipes, library, read_recipes
from hansa.study.recipes.verdict import compare_with_paper, read_measure

__all__ = [
    "SCALES",
    "Recipe",
    "RecipeMeasure",
    "compare_with_paper",
    "find_recipes",
    "library",
    "read_measure",
    "read_recipes",
]
