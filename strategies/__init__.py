"""L1, aggregation: a version of the model of what devices send. A strategy is an object of its parameters.

anabranch.strategies.Teasq(kept=0.05, bits=8)
"""

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
    "strategy_of",
]
