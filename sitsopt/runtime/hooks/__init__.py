"""Hooks for the hardware: each plans from facts, changes settings through a ledger, and gives them back.

run = plan_hooks({"cpu": {}, "nvlink": {"apply": False}})
with run.apply():
    ...                       # as planned
# everything is as it was
"""

from .facts import Fact, Facts, gather
from .host import Host
from .ledger import Ledger
from .plan import Action, Hook, Plan, Refused, Settings, Wanted
from .run import Run, make, names, ordered, plan_hooks

__all__ = [
    "Action", "Fact", "Facts", "Hook", "Host", "Ledger", "Plan", "Refused", "Run", "Settings", "Wanted",
    "gather", "make", "names", "ordered", "plan_hooks",
]  # fmt: skip
