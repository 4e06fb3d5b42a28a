"""Engines: they only transport."""

from hansa.engine.serial import Engine, Serial

__all__ = ["Engine", "Serial"]
