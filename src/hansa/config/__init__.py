"""Configuration: one YAML file describes a run. It is read, validated, and turned into an algorithm and a task."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from hansa.config.compose import Composition, composition
    from hansa.config.loader import (
        build_algorithm,
        cited_works,
        from_preset,
        from_yaml,
        load,
        to_dict,
        to_yaml,
        validate,
    )
    from hansa.config.schema import json_schema
    from hansa.config.sections import Config
    from hansa.config.yaml_text import ConfigError, Document, Problem, parse_document, read_document

__all__ = [
    "Composition",
    "Config",
    "ConfigError",
    "Document",
    "Problem",
    "build_algorithm",
    "cited_works",
    "composition",
    "from_preset",
    "from_yaml",
    "json_schema",
    "load",
    "parse_document",
    "read_document",
    "to_dict",
    "to_yaml",
    "validate",
]

HOMES = {
    **dict.fromkeys(("Composition", "composition"), "hansa.config.compose"),
    **dict.fromkeys(
        ("build_algorithm", "cited_works", "from_preset", "from_yaml", "load", "to_dict", "to_yaml", "validate"),
        "hansa.config.loader",
    ),
    "Config": "hansa.config.sections",
    "json_schema": "hansa.config.schema",
    **dict.fromkeys(
        ("ConfigError", "Document", "Problem", "parse_document", "read_document"), "hansa.config.yaml_text"
    ),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, HOMES)
