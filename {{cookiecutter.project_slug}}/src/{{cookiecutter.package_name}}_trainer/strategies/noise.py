"""Random numbers that an optimizer's own step draws: equal where several processes step the same.

Each rank has its own generators, as for dropout; replicas would drift apart without a word.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from ..data import randomness
from ..errors import UserError
from ..module import TrainingModule
from .optimizer_state import STEPS_SHARD


class Noise:
    """Contexts of optimizers' steps in a run, in which all replicas draw the same."""

    _step, _number = -1, 0

    def __init__(self, module: TrainingModule, devices: Sequence[torch.device]) -> None:
        self._module, self._devices = module, devices

    @contextmanager
    def alike(self, optimizer: Optimizer) -> Iterator[None]:
        """Draw by the run's seed and the step, but in shards, which only one process steps."""
        run = self._module.trainer_state.run
        if run is None or STEPS_SHARD in vars(optimizer):
            yield
            return
        # Each optimizer draws its own numbers, and each of several steps in manual optimization.
        self._number = self._number + 1 if run.global_step == self._step else 0
        self._step, kind = run.global_step, self._devices[0].type
        devices = self._devices if kind != "cpu" else ()
        kind = kind if devices else "cuda"
        with randomness.kept(), torch.random.fork_rng(devices, device_type=kind):
            randomness.seed_generators(randomness.mix(run.seed, self._step, self._number))
            yield


@contextmanager
def drawing_nothing(optimizer: Optimizer) -> Iterator[None]:
    """Context of a step that raises UserError if it has drawn random numbers."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise UserError(
            f"{type(optimizer).__name__}.step draws random numbers, and processes that hold copies "
            "of the same weights would draw others; use strategy='ddp'"
        )
