"""Configuration: one YAML file describes a run. It is read, validated, and turned into an algorithm and a task."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.config.compose import code_names
    from hansa.config.import_path import allow_code, only_look
    from hansa.config.loader import (
        build_algorithm,
        cited_works,
        from_preset,
        from_yaml,
        json_schema,
        load,
        to_dict,
        to_yaml,
        validate,
    )
    from hansa.config.sections import Config
    from hansa.config.yaml_text import ConfigError, Document, Problem, parse_document, read_document

__all__ = [
    "Config",
    "ConfigError",
    "Document",
    "Problem",
    "allow_code",
    "build_algorithm",
    "cited_works",
    "code_names",
    "from_preset",
    "from_yaml",
    "json_schema",
    "load",
    "only_look",
    "parse_document",
    "read_document",
    "to_dict",
    "to_yaml",
    "validate",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
