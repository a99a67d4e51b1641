"""Five federated-learning papers and their baselines; the names below are loaded when they are first used"""

__version__ = "0.2.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks.contract import check as check
    from .core.errors import InputError as InputError
    from .core.folders import find_specs as find_specs
    from .data.concept_drift import DriftSchedule as DriftSchedule, Swap as Swap, drift as drift
    from .data.datasets import Dataset as Dataset, dataset_names as dataset_names, load as load
    from .data.partition import partition as partition
    from .engine.client import Phase as Phase
    from .engine.evaluation import evaluate as evaluate
    from .engine.federation import Federation as Federation
    from .engine.method import Exchange as Exchange, FedAvg as FedAvg, load_methods as load_methods
    from .engine.rounds import History as History, run as run
    from .executors.executors import executor as executor
    from .experiments.specs import Spec as Spec, load_spec as load_spec
    from .models.architectures import architecture as architecture
    from .models.net import Network as Network
    from .models.networks import network as network
    from .reporting.compare import compare as compare
    from .reporting.notebook import result as result

_HOMES = {
    "checks.contract": ("check",),
    "core.errors": ("InputError",),
    "core.folders": ("find_specs",),
    "data.concept_drift": ("DriftSchedule", "Swap", "drift"),
    "data.datasets": ("Dataset", "dataset_names", "load"),
    "data.partition": ("partition",),
    "engine.client": ("Phase",),
    "engine.evaluation": ("evaluate",),
    "engine.federation": ("Federation",),
    "engine.method": ("Exchange", "FedAvg", "load_methods"),
    "engine.rounds": ("History", "run"),
    "executors.executors": ("executor",),
    "experiments.specs": ("Spec", "load_spec"),
    "models.architectures": ("architecture",),
    "models.net": ("Network",),
    "models.networks": ("network",),
    "reporting.compare": ("compare",),
    "reporting.notebook": ("result",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [
    "__version__",
    "Dataset",
    "DriftSchedule",
    "Exchange",
    "FedAvg",
    "Federation",
    "History",
    "InputError",
    "Network",
    "Phase",
    "Spec",
    "Swap",
    "architecture",
    "check",
    "compare",
    "dataset_names",
    "drift",
    "evaluate",
    "executor",
    "find_specs",
    "load",
    "load_methods",
    "load_spec",
    "network",
    "partition",
    "result",
    "run",
]


def __getattr__(name: str) -> Any:
    "A public name, from the module that defines it (PEP 562); it is kept, so that this happens once"
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
