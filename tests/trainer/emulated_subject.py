"""Fits on the emulated GPU, and what was seen of them; started by test_emulated_gpu.py.

``python -m emulated_subject FOLDER`` prints a JSON object last.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from my_project_trainer import strategies
from my_project_trainer.data import moving
from my_project_trainer.loop import checks
from my_project_trainer.run import placement
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import emulated_gpu
import emulated_operations
from emulated_gpu import NAME
from emulated_models import ADAMW, Manual, Measured, Model
from fitting import quiet

STEPS = 8
SAVED = 6
_BATCH = 4


@dataclass(frozen=True)
class Fit:
    model: Callable[[], Model] = Model
    options: tuple[tuple[str, Any], ...] = ()


def _of(model: Callable[[], Model] = Model, **options: Any) -> Fit:
    return Fit(model, tuple(options.items()))


FUSED = partial(Model, partial(ADAMW, fused=True))
FITS = {
    "automatic": _of(),
    "sgd": _of(partial(Model, partial(SGD, lr=0.1, momentum=0.9))),
    "fused": _of(FUSED),
    "manual": _of(Manual),
    "accumulation": _of(accumulate_grad_batches=2),
    "clipping": _of(gradient_clip_val=0.1),
    "clipping values": _of(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "asynchronous": _of(async_checkpoints=True),
    "bf16-mixed": _of(precision="bf16-mixed"),
    "bf16-true": _of(precision="bf16-true"),
    "16-mixed": _of(precision="16-mixed", gradient_clip_val=0.1),
    "16-mixed fused": _of(FUSED, precision="16-mixed"),
    "16-mixed manual": _of(Manual, precision="16-mixed"),
    "torchmetrics": _of(Measured),
    "activations computed again": _of(activation_checkpointing=["Sequential"]),
    "dp": _of(strategy="dp"),
    "ddp": _of(strategy="ddp", gradient_clip_val=0.1),
    "ddp manual": _of(Manual, strategy="ddp", async_checkpoints=True),
}


def _item(x: Tensor, loss: Tensor) -> None:
    loss.item()  # planted: item


def _left(x: Tensor, loss: Tensor) -> None:
    torch.ones(4, 6) * x  # planted: left on the CPU


def _pageable(x: Tensor, loss: Tensor) -> None:
    x + torch.ones(4, 6).to(x.device, non_blocking=True)  # planted: pageable


PLANTED = {"item": _item, "pageable": _pageable, "left on the CPU": _left}


def data(batches: int = STEPS) -> DataLoader[Any]:
    """The same batches each time."""
    x = torch.randn(batches * _BATCH, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=_BATCH)


def make_trainer(folder: Path, accelerator: str, **options: Any) -> Any:
    """A trainer for a fit of so many steps, with a checkpoint within."""
    shared = {"max_epochs": 1, "log_every_n_steps": 1000, "checkpoint_every_n_steps": SAVED}
    shared |= {"accelerator": accelerator, "default_root_dir": folder}
    return quiet(**shared | {"loggers": ["csv"], "keep_checkpoints": 3} | options)


def trained(fit: Fit, folder: Path, accelerator: str = "gpu", **more: Any) -> tuple[Any, Model]:
    options = dict(fit.options)
    running = make_trainer(folder, accelerator, **options, **more)
    torch.manual_seed(0)
    model = fit.model()
    running.fit(model, data(STEPS * options.get("accumulate_grad_batches", 1)), data())
    return running, model


def saved(running: Any) -> Path:
    checkpoint: Path = running.run_directory / "checkpoints" / f"step-{SAVED:08d}"
    return checkpoint


def seen(fit: Fit, folder: Path) -> dict[str, Any]:
    """What a fit comes to: against one on the CPU, and against itself, resumed."""
    running, model = trained(fit, folder / "whole")
    on_cpu, reference = trained(fit, folder / "cpu", "cpu")
    resumed, again = trained(fit, folder / "resumed", resume=str(saved(running)))
    return {
        "steps": running.global_step,
        "devices": sorted(model.devices),
        "waits": model.window.counts.waits,
        "pageable": model.window.counts.pageable,
        "waits in validation": model.validation_window.counts.waits,
        "pageable in validation": model.validation_window.counts.pageable,
        "validated": model.validation_window.counts.operators.total(),
        "operators": sorted(model.window.counts.operators),
        "difference": _difference(model, reference),
        "resumed equal": all(map(torch.equal, _numbers(model).values(), _numbers(again).values())),
        "metrics": running.metrics,
        "metrics on the CPU": on_cpu.metrics,
        "metrics resumed": resumed.metrics,
        "batches": STEPS * dict(fit.options).get("accumulate_grad_batches", 1),
    }


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(_numbers(one).values(), _numbers(other).values(), strict=True)
    return max(float((left.double() - right.double()).abs().max()) for left, right in pairs)


def evaluations(folder: Path) -> dict[str, Any]:
    """Validation, test and prediction of a trained model, against the CPU's."""
    running, model = trained(_of(), folder / "trained")
    on_cpu = make_trainer(folder, "cpu")
    again = Model()
    results: dict[str, Any] = {}
    for name in ("validate", "test"):
        ours = getattr(running, name)(model, data())
        theirs = getattr(on_cpu, name)(again, data(), checkpoint=str(running.run_directory))
        results[name] = [ours, theirs]
    ours = running.predict(model, data())
    theirs = on_cpu.predict(again, data())
    tensors = [tensor for output in ours for tensor in (output["scores"], *output["of"][:1])]
    results["types"] = sorted({type(tensor).__name__ for tensor in tensors})
    pairs = zip(ours, theirs, strict=True)
    results["equal"] = all(torch.allclose(a["scores"], b["scores"], atol=1e-6) for a, b in pairs)
    return results


def batch_sizes(folder: Path) -> dict[str, int]:
    """What the search finds: all there is, for memory does not end."""
    sizes = {}
    for name, make in (("automatic", Model), ("manual", Manual)):
        model = make()
        model.network[1] = nn.LayerNorm(16)  # BatchNorm takes no batch of one sample
        searching = make_trainer(folder, "gpu", precision="16-mixed")
        sizes[name] = searching.find_batch_size(model, data())
    return sizes


def planted(folder: Path) -> dict[str, Any]:
    """What is seen of faults that were planted."""
    outcomes: dict[str, Any] = {}
    for name, work in PLANTED.items():
        model = Model(work=work)
        try:
            make_trainer(folder / name, "gpu").fit(model, data())
        except RuntimeError as error:
            outcomes[name] = str(error)
        else:
            counts = model.window.counts
            outcomes[name] = {"waits": counts.waits, "pageable": counts.pageable}
    with (
        mock.patch.object(moving, "copy_stream", return_value=None),
        mock.patch.object(moving, "to", lambda tensor, device, dtype: tensor),
    ):
        try:
            make_trainer(folder / "unmoved", "gpu").fit(Model(), data())
        except RuntimeError as error:
            outcomes["unmoved"] = str(error)
    return outcomes


@contextmanager
def on_emulated_gpu() -> Iterator[None]:
    """Have the trainer find the emulated device where it looks for a GPU."""
    emulated_gpu.install()
    # Looked at together by every other step, and not by the 64th alone.
    checks._BLOCK = 2
    for name in ("single_device", "dp", "ddp"):
        strategy = strategies.find(name).cls
        strategy.limits = replace(strategy.limits, accelerators=("cpu", "cuda", NAME))
    device_of = {"cpu": "cpu", "gpu": NAME}
    with mock.patch.object(placement, "choose_accelerator", device_of.__getitem__):
        yield


def crossings(folder: Path) -> dict[str, float]:
    """What a fit that is resumed on the other device differs by, without dropout."""
    differences = {}
    for name, make in (("default", ADAMW), ("fused", partial(ADAMW, fused=True))):
        for first, second in (("cpu", "gpu"), ("gpu", "cpu")):
            fit, place = _of(partial(_without_dropout, make)), folder / name / first
            running, uninterrupted = trained(fit, place / "whole", first)
            _, resumed = trained(fit, place / "resumed", second, resume=str(saved(running)))
            differences[f"{name}, {first} to {second}"] = _difference(uninterrupted, resumed)
    return differences


def _without_dropout(make: Callable[..., Optimizer]) -> Model:
    model = Model(make)
    model.network[3] = nn.Identity()
    return model


def attempted(work: Callable[..., Any], *arguments: Any) -> Any:
    """What it gives, or how it failed: the rest is seen all the same."""
    try:
        return work(*arguments)
    except Exception:
        return {"failed": traceback.format_exc()}


def main(folder: Path) -> None:
    with on_emulated_gpu():
        results = {
            "detected": attempted(emulated_operations.detected),
            "streams": attempted(emulated_operations.streams),
            "mixtures": attempted(emulated_operations.mixtures),
            "fits": {name: attempted(seen, fit, folder / name) for name, fit in FITS.items()},
            "evaluations": attempted(evaluations, folder / "evaluations"),
            "crossings": attempted(crossings, folder / "crossings"),
            "batch sizes": attempted(batch_sizes, folder / "sizes"),
            "planted": attempted(planted, folder / "planted"),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
