"""One rank of a gloo group; started by tests of what ranks do together.

``python -m group_worker SUBJECT RANK PROCESSES FOLDER`` prints or writes what came of it.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer.errors import UserError
from my_project_trainer.launch.rendezvous import stay_on_loopback
from my_project_trainer.loop import trials
from my_project_trainer.strategies import sync_batchnorm
from safetensors.torch import save_file
from tests.project import PATIENCE, start
from torch import Tensor, nn

from torch_versions import OLDEST


def run_ranks(subject: str, processes: int, folder: Path, timeout: float = PATIENCE) -> list[str]:
    """What each rank printed; none outlives the call."""
    arguments = ["-m", "group_worker", subject]
    ranks = [start([*arguments, str(rank), str(processes), folder]) for rank in range(processes)]
    try:
        deadline = time.monotonic() + timeout
        ended = [rank.communicate(timeout=deadline - time.monotonic()) for rank in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert [rank.returncode for rank in ranks] == [0] * processes, [error for _, error in ended]
    return [output for output, _ in ended]


FEATURES = 3
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A BatchNorm and what it is trained on: so many samples on each rank, of such a shape."""

    parts: tuple[int, ...]
    kind: type[nn.Module] = nn.BatchNorm1d
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    offset: float = 1.0

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each step's whole batch, and the gradient of the loss by the output."""
        generator = torch.Generator().manual_seed(0)
        size = (sum(self.parts), FEATURES, *self.shape)
        for _ in range(STEPS):
            inputs, gradients = torch.randn((2, *size), generator=generator, dtype=torch.float64)
            yield (inputs * 2 + self.offset).to(self.dtype), gradients.to(self.dtype)

    def make(self) -> nn.Module:
        """The module, with weights that are not all one."""
        module = nn.Sequential(self.kind(FEATURES, **self.options)).to(self.dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(0.5, 2, FEATURES))
        return module

    def train(self, module: nn.Module, share: slice) -> dict[str, Tensor]:
        """What a part of each batch gives, in training and then in evaluation."""
        tensors = {}
        for step, (batch, gradients) in enumerate(self.batches()):
            inputs = batch[share].clone().requires_grad_()
            output = module(inputs)
            (output * gradients[share]).sum().backward()
            assert inputs.grad is not None
            tensors |= {f"output{step}": output.detach(), f"input_gradient{step}": inputs.grad}
            tensors |= {f"buffer.{step}.{name}": value for name, value in copies(module.buffers())}
        if self.options.get("track_running_stats", True):  # else each part has its own
            tensors["evaluated"] = module.eval()(next(self.batches())[0][share]).detach()
        gradients = [(name, parameter.grad) for name, parameter in module.named_parameters()]
        return tensors | {f"gradient.{name}": grad for name, grad in gradients if grad is not None}


def copies(tensors: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
    return enumerate([tensor.clone() for tensor in tensors])


NO_BIAS = {2: Case((5, 2), options={"bias": False}), 3: Case((4, 1, 3), options={"bias": False})}
CASES = {
    **({} if OLDEST else {"no bias": NO_BIAS}),  # in torch 2.10 it has one
    "even": {2: Case((4, 4)), 3: Case((4, 4, 4))},
    "uneven": {2: Case((5, 2)), 3: Case((4, 1, 3))},
    "one sample each": {2: Case((1, 1)), 3: Case((1, 1, 1))},
    "none on a rank": {2: Case((0, 4)), 3: Case((3, 0, 2))},
    "sequences": {2: Case((3, 1), shape=(5,)), 3: Case((3, 1, 2), shape=(5,))},
    "images": {2: Case((3, 1), nn.BatchNorm2d, (4, 5)), 3: Case((3, 1, 2), nn.BatchNorm2d, (4, 5))},
    "volumes": {
        2: Case((3, 1), nn.BatchNorm3d, (2, 3, 4)),
        3: Case((3, 1, 2), nn.BatchNorm3d, (2, 3, 4)),
    },
    "float32": {
        2: Case((5, 3), nn.BatchNorm2d, (4, 5), torch.float32),
        3: Case((4, 1, 3), nn.BatchNorm2d, (4, 5), torch.float32),
    },
    "far from zero": {2: Case((5, 3), offset=1e6), 3: Case((5, 1, 3), offset=1e6)},
    "mean of all batches": {
        2: Case((5, 2), options={"momentum": None}),
        3: Case((4, 1, 3), options={"momentum": None}),
    },
    "no parameters": {
        2: Case((5, 2), options={"affine": False}),
        3: Case((4, 1, 3), options={"affine": False}),
    },
    "no running statistics": {
        2: Case((5, 2), options={"track_running_stats": False}),
        3: Case((4, 1, 3), options={"track_running_stats": False}),
    },
}


def train_cases(rank: int, processes: int, folder: Path) -> None:
    for name, sizes in CASES.items():
        case = sizes[processes]
        bounds = [0, *itertools.accumulate(case.parts)]
        module = sync_batchnorm.convert(case.make(), "cpu")
        trained = case.train(module, slice(bounds[rank], bounds[rank + 1]))
        tensors = {key: tensor.contiguous() for key, tensor in trained.items()}
        save_file(tensors, folder / f"{name}.{rank}")


MOST = (37, 21, 90)  # that fit on each rank


def find_batch_size(rank: int, processes: int, folder: Path) -> None:
    tried = []

    def trial(size: int) -> bool:
        def step() -> None:
            tried.append(size)
            if size > MOST[rank]:
                raise torch.OutOfMemoryError("planted")

        return bool(trials.fits_in_memory(step))

    print(trials.largest_that_fits(trial, 4 + rank, 1000), tried)


def too_large_a_start(rank: int, processes: int, folder: Path) -> None:
    """Print what every rank is told when the first size does not fit on one of them."""
    try:
        trials.largest_that_fits(lambda size: rank == 0, 8, 1000)
    except UserError as error:
        print(error)


SHAPES = {"matrix": (5, 7), "bias": (3,), "number": (1,)}
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.01}
FREEZE_STEP, ADAM_STEPS = 3, 9


def draw(name: str, step: int, rank: int) -> Tensor:
    """A rank's gradient of a parameter in a step; of step -1, the parameter."""
    seed = 100 * step + 10 * rank + list(SHAPES).index(name) + 1000
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def step_one_bit_adam(rank: int, processes: int, folder: Path) -> None:
    """Write what each step makes of parameters, momentum and the errors of compression."""
    from my_project_trainer.strategies.deepspeed import onebit_adam as onebit

    parameters = {name: nn.Parameter(draw(name, -1, 0)) for name in SHAPES}
    optimizer = onebit.OneBitAdam(parameters.values(), freeze_step=FREEZE_STEP, **ADAM)
    tensors = {}
    for step in range(ADAM_STEPS):
        ranks = [rank] if optimizer.compresses else range(processes)
        for name, parameter in parameters.items():
            parameter.grad = torch.stack([draw(name, step, number) for number in ranks]).mean(0)
        optimizer.step()
        for name, parameter in parameters.items():
            tensors[f"{step}.{name}"] = parameter.detach().clone()
            tensors[f"{step}.{name}.momentum"] = optimizer.state[parameter]["exp_avg"].clone()
            for key, value in vars(optimizer.errors.get(parameter, object)).items():
                if isinstance(value, Tensor):
                    tensors[f"{step}.{name}.{key}"] = value.clone()
    save_file(tensors, folder / f"{rank}.safetensors")


def main(subject: str, rank: int, processes: int, folder: Path) -> None:
    stay_on_loopback()
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    subjects = (train_cases, find_batch_size, too_large_a_start, step_one_bit_adam)
    next(function for function in subjects if function.__name__ == subject)(rank, processes, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
