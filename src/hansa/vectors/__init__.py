"""Arithmetic on flat vectors: the layout of a module in one, whole-vector passes, memory that is used again."""

from typing import TYPE_CHECKING

from hansa.later import later

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__)
