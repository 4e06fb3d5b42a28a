"""Published tables and figures as data, and how our numbers are compared with theirs."""

from hansa.study.recipes.recipe import SCALES, Cell, Claim, Measure, Published, Recipe, library, named, published, read
from hansa.study.recipes.verdict import Compared, Held, compare, reading, rule

__all__ = [
    "SCALES",
    "Cell",
    "Claim",
    "Compared",
    "Held",
    "Measure",
    "Published",
    "Recipe",
    "compare",
    "library",
    "named",
    "published",
    "read",
    "reading",
    "rule",
]
