"""The registry of components: their kinds, the components of each kind by name, and how to build one from a file.

>>> from hansa.config.registry import component_field
>>> from hansa.compress import Uplink
>>> component_field(Uplink).build({"kind": "error_feedback", "compressor": {"kind": "top_k", "ratio": "1/64"}})
error_feedback(compressor=top_k(ratio=0.015625, values='float32'))
"""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.config.registry.components import (
        KINDS,
        Argument,
        ConfigValueError,
        Factory,
        Keys,
        Kind,
        Signature,
        register_kind,
        signature_of,
        unknown_plugins,
    )
    from hansa.config.registry.fields import ComponentField, component_field, field_for_argument
    from hansa.config.registry.plugins import Plugin, normalize_name

__all__ = [
    "KINDS",
    "Argument",
    "ComponentField",
    "ConfigValueError",
    "Factory",
    "Keys",
    "Kind",
    "Plugin",
    "Signature",
    "component_field",
    "field_for_argument",
    "normalize_name",
    "register_kind",
    "signature_of",
    "unknown_plugins",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
