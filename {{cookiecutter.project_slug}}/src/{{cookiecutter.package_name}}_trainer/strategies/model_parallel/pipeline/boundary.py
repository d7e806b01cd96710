"""Where the user's step calls ``sequential_module``: there it enters and leaves the pipeline."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ....data import randomness
from ....errors import UserError
from ....module import TrainingModule
from .partition import ATTRIBUTE

Compute = Callable[[tuple[Any, ...]], Any]
"""Gets the inputs of ``sequential_module`` and returns its output."""


@dataclass(frozen=True)
class Step:
    """The user's step on a micro-batch."""

    run: Callable[[], Any]
    """Returns, in training, what to call backward on."""
    seed: int | None = None
    """Seed of its random numbers before ``sequential_module``; ``None``: not seeded."""
    samples: float | None = None
    """What it counts; ``None``: what the batch does."""
    checkpointed: bool = False
    """Whether stages recompute their activations."""


class _Reached(BaseException):
    """Ends a step on the first stage; the user's ``except Exception`` does not catch it."""


def _stop(inputs: tuple[Any, ...]) -> Any:
    raise _Reached(*inputs)


class Boundary:
    """Replaces the call of ``sequential_module`` in a step until :meth:`close`.

    A step gets the seed of the random numbers before the call, which are the same on the first and
    the last process. ``device``: whose random numbers it may draw.
    """

    def __init__(self, module: TrainingModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._sequential: nn.Module = getattr(module, ATTRIBUTE)
        self._compute: Compute | None = None
        self._calls = 0
        self._before: ExitStack = ExitStack()
        vars(self._sequential)["forward"] = self._forward

    def close(self) -> None:
        """Restore the module."""
        vars(self._sequential).pop("forward", None)

    def _forward(self, *inputs: Any) -> Any:
        if self._compute is None:
            raise UserError(f"{ATTRIBUTE} is called outside of a step; call it in a step")
        self._calls += 1
        if self._calls > 1:
            raise UserError(
                f"a step calls {ATTRIBUTE} twice; a pipeline runs it once: use strategy='fsdp'"
            )
        self._before.close()
        return self._compute(inputs)

    def inputs(self, step: Step) -> tuple[Any, ...]:
        """Run a step until it calls ``sequential_module``; return what it gives to it."""
        vars(self._module)["log"] = lambda *_, **__: None  # the process with the last stage logs
        inputs: tuple[Any, ...] = ()
        try:
            self.outputs(step, _stop)
        except _Reached as reached:
            inputs = reached.args
        finally:
            del vars(self._module)["log"]
        return inputs

    def outputs(self, step: Step, compute: Compute) -> Any:
        """Run a step in which ``compute`` replaces ``sequential_module``."""
        module, state = self._module, self._module.trainer_state
        module.trainer_state = replace(state, samples=step.samples)
        self._compute, self._calls = compute, 0
        try:
            with ExitStack() as self._before:
                if step.seed is not None:
                    self._before.enter_context(self.seeded(step.seed))
                outputs = step.run()
        finally:
            self._compute, module.trainer_state = None, state
        if not self._calls:
            raise UserError(
                f"{type(self._module).__name__}: a step did not call self.{ATTRIBUTE}; call it, "
                "not its children"
            )
        return outputs

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw the random numbers in this context from a seed."""
        with randomness.Stream(seed), ExitStack() as stack:
            if self._device.type != "cpu":
                own: Any = torch.get_device_module(self._device)
                stack.callback(own.set_rng_state, own.get_rng_state(self._device), self._device)
                own.manual_seed(seed)
            yield
