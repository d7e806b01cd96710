"""The training loop, evaluation and manual optimization.

``FitLoop`` calls the methods of a strategy in order. Imports every folder but ``run``; uses a
strategy only through the contract in ``strategies/base.py``.
"""

from .evaluation import check_validation, evaluate, predict
from .fit import FitLoop
from .manual_optimization import ManualOptimization
from .parts import FitParts
from .position import Position

__all__ = [
    "FitLoop",
    "FitParts",
    "ManualOptimization",
    "Position",
    "check_validation",
    "evaluate",
    "predict",
]
