"""What a short fit costs, or a hand-written loop that trains the same: prints JSON at its end.

``python cost_subject.py loop``, ``bare`` (no loggers, no progress bar) or ``defaults``.
"""

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

STEPS = 60
# Steps that are not logged: the calls of these are counted, and the operations of those.
CALLS, OPERATIONS = (10, 30), (30, 49)
TRAINER = "my_project_trainer"


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Meter:
    """Notes the functions that are called from now on, and counts in some steps."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.step = self.calls = 0
        self.operations = Operations()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def tick(self) -> None:
        self.step += 1
        if self.step == CALLS[0]:
            sys.setprofile(self._count)
        if self.step == CALLS[1]:
            sys.setprofile(self._note)
        if self.step == OPERATIONS[0]:
            self.operations.__enter__()
        if self.step == OPERATIONS[1]:
            self.operations.__exit__(None, None, None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        self.calls += event == "call"

    def result(self) -> dict[str, Any]:
        sys.setprofile(None)
        packages = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
        return {
            "calls": self.calls / (CALLS[1] - CALLS[0]),
            "operations": self.operations.count / (OPERATIONS[1] - OPERATIONS[0]),
            "peak_kib": _peak_memory(),
            "packages": sorted(packages - {TRAINER}),
            "modules": sum(name.partition(".")[0] == TRAINER for name in sys.modules),
            "lines": {str(path): path.read_bytes().count(b"\n") for path in self._executed()},
        }

    def _executed(self) -> Iterator[Path]:
        """The trainer's files of which a function was called; importing one is not enough."""
        functions = (code for code in self.codes if code.co_flags & 2)  # not a module, nor a class
        for name in sorted({function.co_filename for function in functions}):
            if TRAINER in Path(name).parts:
                yield Path(name)


def _peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def subject() -> tuple[nn.Module, DataLoader[Any]]:
    """A model so small that all else costs more, and its data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    x = torch.randn(8 * STEPS, 32)
    return net, DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=8, shuffle=True)


def loop(meter: Meter) -> None:
    """A hand-written training loop."""
    net, loader = subject()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        meter.tick()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def fit(meter: Meter, logs: bool) -> None:
    """The same by the trainer."""
    from my_project_trainer import Trainer, TrainingModule

    class Module(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loader = subject()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            meter.tick()
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

        def train_dataloader(self) -> DataLoader[Any]:
            return self.loader

    options: dict[str, Any] = {} if logs else {"loggers": [], "enable_progress_bar": False}
    Trainer(accelerator="cpu", devices=1, max_epochs=1, **options).fit(Module())


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] != "loop":
        importlib.import_module(TRAINER)  # calls of functions while it is imported do not count
    meter = Meter()
    if sys.argv[1] == "loop":
        loop(meter)
    else:
        fit(meter, logs=sys.argv[1] == "defaults")
    print(json.dumps(meter.result()))


if __name__ == "__main__":
    main()
