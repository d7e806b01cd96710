"""``deepspeed_stage_1`` … ``deepspeed_stage_3_offload``: ``deepspeed`` by the name of its stage."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import ConfigurationError
from .strategy import DeepSpeed


class DeepSpeedStage1(DeepSpeed):
    """DeepSpeed ZeRO 1: optimizer states sharded over the processes.

    Args:
        options: of :class:`~.deepspeed.DeepSpeed`, but those that the name gives.
    """

    named: ClassVar[Mapping[str, Any]] = {"stage": 1}

    def __init__(self, **options: Any) -> None:
        twice = [name for name in self.named if name in options]
        if twice:
            raise ConfigurationError(
                f"strategy_options.{twice[0]}: the strategy's name gives it; use "
                "strategy='deepspeed' to choose it"
            )
        super().__init__(**self.named, **options)

    def problems(self, given: Mapping[str, Any]) -> list[str]:
        stage = self.named["stage"]
        if self.stage == stage:
            return super().problems(given)
        return [
            f"zero_optimization.stage={self.stage} in the DeepSpeed configuration, and the "
            f"strategy's name says {stage}; use strategy='deepspeed', which takes either",
            *super().problems(given),
        ]


class DeepSpeedStage2(DeepSpeedStage1):
    """DeepSpeed ZeRO 2: optimizer states and gradients sharded."""

    named: ClassVar[Mapping[str, Any]] = {"stage": 2}


class DeepSpeedStage3(DeepSpeedStage1):
    """DeepSpeed ZeRO 3: optimizer states, gradients and parameters sharded."""

    named: ClassVar[Mapping[str, Any]] = {"stage": 3}


class DeepSpeedStage2Offload(DeepSpeedStage1):
    """DeepSpeed ZeRO 2 with the optimizer states on the CPU."""

    named: ClassVar[Mapping[str, Any]] = {"stage": 2, "offload_optimizer": True}


class DeepSpeedStage3Offload(DeepSpeedStage1):
    """DeepSpeed ZeRO 3 with parameters and optimizer states on the CPU."""

    named: ClassVar[Mapping[str, Any]] = {
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
    }
