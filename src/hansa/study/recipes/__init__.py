"""Published tables and figures as data, and their comparison with measured numbers."""

from hansa.study.recipes.recipe import SCALES, Recipe, find_recipes, library, read_recipes

__all__ = ["SCALES", "Recipe", "find_recipes", "library", "read_recipes"]
