"""One YAML file describes a run: read, checked, resolved, and turned into an algorithm and a task."""

from hansa.config.compose import Composition, composition
from hansa.config.load import algorithm, check, cited_by, from_preset, from_text, load, to_data, to_text
from hansa.config.schema import json_schema
from hansa.config.sections import Config
from hansa.config.yaml_text import ConfigError, Document, Problem, parse, read

__all__ = [
    "Composition",
    "Config",
    "ConfigError",
    "Document",
    "Problem",
    "algorithm",
    "check",
    "cited_by",
    "composition",
    "from_preset",
    "from_text",
    "json_schema",
    "load",
    "parse",
    "read",
    "to_data",
    "to_text",
]
