"""Automatic hybrid parallel training for PyTorch: `compile(model, cluster)`.

Names load on first use, so that plans and programs can be read without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efftra_fx.api import CompiledModel, compile
    from efftra_fx.check import CheckReport
    from efftra_fx.cluster import Cluster, Device, Link
    from efftra_fx.cost import CostTable
    from efftra_fx.errors import EfftraError
    from efftra_fx.plan import Plan, Stage
    from efftra_fx.proof import verify

__version__ = "0.1.0"

_HOMES = {
    "CheckReport": "check",
    "Cluster": "cluster",
    "CompiledModel": "api",
    "CostTable": "cost",
    "Device": "cluster",
    "EfftraError": "errors",
    "Link": "cluster",
    "Plan": "plan",
    "Stage": "plan",
    "compile": "api",
    "verify": "proof",
}

__all__ = [
    "CheckReport",
    "Cluster",
    "CompiledModel",
    "CostTable",
    "Device",
    "EfftraError",
    "Link",
    "Plan",
    "Stage",
    "compile",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'efftra_fx' has no attribute {name!r}")
    return getattr(import_module(f"efftra_fx.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
