"""Call ``prepare_data``, ``setup`` and ``teardown`` of the data module and the module."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from ..data import Data
from ..errors import UserError
from ..launch import collectives
from ..memory import meta_device
from ..module import DataModule, StageHooks, TrainingModule, is_overridden
from .plan import Plan

StageName = Literal["fit", "validate", "test", "predict"]


@contextlib.contextmanager
def prepared(
    plan: Plan, stage: StageName, module: TrainingModule, data: Data, *, is_started: bool
) -> Iterator[None]:
    """Call the hooks before and after a command.

    Args:
        plan: The run's.
        stage: The command.
        module: The user's module.
        data: Its data module's hooks are called before those of the module.
        is_started: Whether this process was started for the command, whose weights are returned.

    Raises:
        UserError: ``setup`` has created layers whose weights cannot be returned.
    """
    owners = [*([data] if isinstance(data, DataModule) else []), module]
    preparing = [each for each in owners if is_overridden(each, StageHooks, "prepare_data")]
    if preparing:
        if plan.layout.local_rank == 0:
            for each in preparing:
                each.prepare_data()
        collectives.barrier()
    before = _shapes(module)
    for each in owners:
        with _building(plan) if each is module else nullcontext():
            each.setup(stage)
    if is_started and (changed := before.items() ^ _shapes(module).items()):
        name = type(module).__name__
        raise UserError(
            f"{name}.setup changes {min(changed)[0]}: with strategy={plan.strategy_name!r}, "
            "weights are returned into the module of the script; create it in __init__, or use "
            "'ddp'"
        )
    yield
    for each in owners:
        each.teardown(stage)


def _building(plan: Plan) -> AbstractContextManager[object]:
    return meta_device.building() if plan.options.meta_device else nullcontext()


def _shapes(module: TrainingModule) -> dict[str, torch.Size]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: each.shape for name, each in named}
