"""A fit and its resume in forks of this process, while file operations fail (disk_faults.c)."""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Trainer
from my_project_trainer.callbacks import BestCheckpoint
from my_project_trainer.errors import UserError
from my_project_trainer.launch import failures, reports
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fitting import Descends

STEPS = 4


class Net(Descends, by=torch.optim.Adam, lr=0.1):
    """Its validation improves each time, so that each best checkpoint replaces one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 1), nn.Dropout(0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.dropout(self.layer(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.global_step))

    def train_dataloader(self) -> Any:
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def fit(root: Path, asynchronous: bool, steps: int = STEPS) -> None:
    torch.manual_seed(0)
    module = Net()
    Trainer(
        **{"accelerator": "cpu", "devices": 1, "loggers": ["csv"], "log_every_n_steps": 1},
        **{"max_steps": steps, "checkpoint_every_n_steps": 1, "val_every_n_steps": 2},
        **{"callbacks": [BestCheckpoint("score", mode="max")], "enable_progress_bar": False},
        **{"default_root_dir": root, "run_name": "run", "resume": "auto"},
        async_checkpoints=asynchronous,
    ).fit(module)


def attempt(root: Path, asynchronous: bool, *fault: Any) -> tuple[int, int, str, str]:
    """Fit in a fork: its code, the operations, which failed, and what was printed."""
    log, told = (root.parent / f"{kind}-{root.name}" for kind in ("log", "told"))
    told.unlink(missing_ok=True)
    if (child := os.fork()) == 0:
        signal.alarm(600)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        SHIM.arm(str(root).encode(), *fault)
        code = 0
        try:
            fit(root, asynchronous)
        except BaseException as error:
            code = reports.exit_code(error)
            is_told = isinstance(error, UserError)
            print(failures.describe(error)) if is_told else traceback.print_exc()
        counts = [SHIM.counted(), SHIM.failed().decode()]
        SHIM.arm(b"", 0, b"", 0)
        told.write_text(json.dumps(counts))
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count, failed = json.loads(told.read_text()) if told.exists() else (0, "killed")
    return code, count, failed, log.read_text(errors="replace")


def result(root: Path) -> dict[str, str]:
    """The log, and the tensors of the newest checkpoint and of the best one."""
    run = root / "run"
    paths = [run / "metrics.csv", *run.glob("checkpoints/**/step-*4/*.safetensors")]
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
    }


def main(folder: Path, asynchronous: bool, faults: list[tuple[int, str, int, int]]) -> None:
    """Print a line for each fault: how the fit ended, how its resume did, what is equal and left.

    A fault is the number of the operation, kinds of those that fail, an error, and how many steps
    were made before.
    """
    fit(folder / "2", False, 2)  # which imports what each fork would import
    (folder / "0").mkdir()
    counts = {}
    for begun in (0, 2):
        reference = shutil.copytree(folder / f"{begun}", folder / f"whole-{begun}", symlinks=True)
        _, counts[begun], _, _ = attempt(reference, asynchronous, -1, b"", 0)
        expected = result(reference)
        print(json.dumps({"begun": begun, "operations": counts[begun], "files": expected}))
    for number, kinds, code, begun in faults:
        if number > counts[begun]:
            continue
        root = folder / f"{begun}-{number}-{kinds.strip()}-{code}"
        shutil.copytree(folder / f"{begun}", root, symlinks=True)
        ended, _, failed, said = attempt(root, asynchronous, number, kinds.encode(), code)
        again = attempt(root, asynchronous, -1, b"", 0)
        files = {}
        with contextlib.suppress(OSError):
            files = result(root)
        hidden = [path.name for path in root.rglob(".*") if path.name != ".lock"]
        fault = [number, kinds, code, begun]
        line = {"fault": fault, "failed": failed, "code": ended, "said": said}
        line |= {"again": again[0], "told": again[3], "hidden": hidden}
        line |= {"differs": sorted(k for k in expected if files.get(k) != expected[k])}
        print(json.dumps(line), flush=True)
        shutil.rmtree(root)


if __name__ == "__main__":
    SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])
    SHIM.failed.restype = ctypes.c_char_p
    main(Path(sys.argv[1]), sys.argv[2] == "True", json.loads(sys.argv[3]))
