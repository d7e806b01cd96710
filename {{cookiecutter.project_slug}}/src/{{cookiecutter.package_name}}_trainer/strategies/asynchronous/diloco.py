"""``diloco``: local steps, then a step of an outer optimizer on the average of what they changed.

Source: https://arxiv.org/abs/2311.08105
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import fill
from ...errors import ConfigurationError
from .local_sgd import LocalSGD


class DiLoCo(LocalSGD):
    """``local_sgd`` with an outer optimizer: SGD with Nesterov momentum.

    Its gradient is the average over ranks of how far the parameters have moved in a period,
    negated. With a learning rate of 1 and no momentum, it is ``local_sgd``.

    Args:
        every_n_steps: Optimizer steps between two outer steps, at least 1.
        warmup_steps: Optimizer steps at the start in which gradients are averaged instead, as
            under ``ddp``.
        outer_learning_rate: Above 0.
        outer_momentum: From 0 to below 1.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.

    Raises:
        ConfigurationError: An option is out of range.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        warmup_steps: int = 0,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = self.problems_of_options(every_n_steps=every_n_steps, warmup_steps=warmup_steps)
        if outer_learning_rate <= 0:
            problems.append(
                f"strategy_options.outer_learning_rate={outer_learning_rate!r}: give a number "
                "above 0"
            )
        if not 0 <= outer_momentum < 1:
            problems.append(
                f"strategy_options.outer_momentum={outer_momentum!r}: give a number from 0 to "
                "below 1"
            )
        if problems:
            raise ConfigurationError(problems)
        super().__init__(every_n_steps, warmup_steps, timeout_seconds)
        self.outer_learning_rate = outer_learning_rate
        self.outer_momentum = outer_momentum
        self._momenta: dict[str, Tensor] = {}

    def advance(self, names: Sequence[str], starts: list[Tensor], progress: list[Tensor]) -> None:
        # The update of torch.optim.SGD(nesterov=True), which subtracts a gradient.
        momenta = [
            self._momenta.setdefault(name, torch.zeros_like(start))
            for name, start in zip(names, starts, strict=True)
        ]
        torch._foreach_mul_(momenta, self.outer_momentum)
        torch._foreach_add_(momenta, progress)
        steps = torch._foreach_add(progress, momenta, alpha=self.outer_momentum)
        torch._foreach_add_(starts, list(steps), alpha=self.outer_learning_rate)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "momenta": dict(self._momenta)}

    def load_shared_state(self, saved: Mapping[str, Any]) -> None:
        super().load_shared_state(saved)
        for name, each in saved.get("momenta", {}).items():  # local_sgd saves none
            self._momenta[name] = torch.empty_like(self._starts[name])
            fill(self._momenta[name], each)

    def teardown(self) -> None:
        super().teardown()
        self._momenta = {}
