"""Engines: they only transport."""

from hansa.engine.choose import choose
from hansa.engine.pool import Pool
from hansa.engine.processes import Processes
from hansa.engine.serial import Engine, Serial

__all__ = ["Engine", "Pool", "Processes", "Serial", "choose"]
