"""The training loop, evaluation and manual optimization.

``FitLoop`` calls the methods of a strategy in order. Imports every folder but ``run``; uses a
strategy only through the contract in ``strategies/base.py``.
"""
