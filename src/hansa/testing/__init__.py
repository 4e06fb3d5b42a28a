"""Checks that custom components satisfy their protocols. Each raises an AssertionError that names the requirement.

>>> from hansa import compress, testing
>>> testing.check_compressor(compress.sign())

Hansa's built-in components pass the same checks.
"""

from hansa.testing.gossip_contracts import check_activity, check_clustering, check_mixing_rule, check_topology
from hansa.testing.local_contracts import check_solver, check_work
from hansa.testing.requirements import ContractError
from hansa.testing.server_contracts import check_aggregator, check_sampler, check_server
from hansa.testing.task_check import TaskCheck, check_task
from hansa.testing.wire_contracts import check_compressor, check_downlink, check_uplink

__all__ = [
    "ContractError",
    "TaskCheck",
    "check_activity",
    "check_aggregator",
    "check_clustering",
    "check_compressor",
    "check_downlink",
    "check_mixing_rule",
    "check_sampler",
    "check_server",
    "check_solver",
    "check_task",
    "check_topology",
    "check_uplink",
    "check_work",
]
