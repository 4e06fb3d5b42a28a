"""Arithmetic on flat vectors: the layout of a module in one, whole-vector passes, memory that is used again."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
