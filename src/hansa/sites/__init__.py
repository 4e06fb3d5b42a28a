"""A federation of real sites: the agent that lives at a site, the server that asks the sites, and Flower between them.

The protocol is `hansa.federation`'s; driver, presets, metrics, checkpoints and reports are those of a simulation.
"""

from hansa.sites.agent import Agent
from hansa.sites.policy import Policy
from hansa.sites.serve import Server
from hansa.sites.transport import Charged, Post

__all__ = ["Agent", "Charged", "Policy", "Post", "Server"]
