"""L1, aggregation: a version of the model of what devices send. A strategy is an object of its parameters.

anabranch.strategies.Teasq(kept=0.05, bits=8)

Each is imported when it is first asked for: a run needs one of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.strategies.ace import ACE, ACED
    from anabranch.strategies.annealed import Annealed
    from anabranch.strategies.asyncdrop import AsyncDrop
    from anabranch.strategies.ca2fl import CA2FL
    from anabranch.strategies.delayed_nesterov import DelayedNesterov
    from anabranch.strategies.fadas import FADAS
    from anabranch.strategies.fedasmu import FedASMU
    from anabranch.strategies.fedasync import FedAsync
    from anabranch.strategies.fedavg import FedAvg
    from anabranch.strategies.fedbuff import FedBuff
    from anabranch.strategies.fedcompass import FedCompass
    from anabranch.strategies.fedfa import FedFa
    from anabranch.strategies.fedprox import FedProx
    from anabranch.strategies.phased import Phased
    from anabranch.strategies.port import PORT
    from anabranch.strategies.qafel import QAFeL
    from anabranch.strategies.registry import strategy_of
    from anabranch.strategies.teasq import Teasq
    from anabranch.strategies.teasq_drop import TeasqDrop
    from anabranch.strategies.waves import Waves

__all__ = [
    "ACE",
    "ACED",
    "CA2FL",
    "FADAS",
    "PORT",
    "Annealed",
    "AsyncDrop",
    "DelayedNesterov",
    "FedASMU",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedCompass",
    "FedFa",
    "FedProx",
    "Phased",
    "QAFeL",
    "Teasq",
    "TeasqDrop",
    "Waves",
    "strategy_of",
]

# Where each lies, by the name that settings have for it.
PLACES = {
    "ace": "anabranch.strategies.ace:ACE",
    "aced": "anabranch.strategies.ace:ACED",
    "annealed": "anabranch.strategies.annealed:Annealed",
    "asyncdrop": "anabranch.strategies.asyncdrop:AsyncDrop",
    "ca2fl": "anabranch.strategies.ca2fl:CA2FL",
    "delayed_nesterov": "anabranch.strategies.delayed_nesterov:DelayedNesterov",
    "fadas": "anabranch.strategies.fadas:FADAS",
    "fedasmu": "anabranch.strategies.fedasmu:FedASMU",
    "fedasync": "anabranch.strategies.fedasync:FedAsync",
    "fedavg": "anabranch.strategies.fedavg:FedAvg",
    "fedbuff": "anabranch.strategies.fedbuff:FedBuff",
    "fedcompass": "anabranch.strategies.fedcompass:FedCompass",
    "fedfa": "anabranch.strategies.fedfa:FedFa",
    "fedprox": "anabranch.strategies.fedprox:FedProx",
    "phased": "anabranch.strategies.phased:Phased",
    "port": "anabranch.strategies.port:PORT",
    "qafel": "anabranch.strategies.qafel:QAFeL",
    "teasq": "anabranch.strategies.teasq:Teasq",
    "teasq_drop": "anabranch.strategies.teasq_drop:TeasqDrop",
    "waves": "anabranch.strategies.waves:Waves",
}
_HOMES = {name: home for home, _, name in (place.partition(":") for place in PLACES.values())}
_HOMES["strategy_of"] = "anabranch.strategies.registry"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
