"""Trains models in processes that are forked from this one, which has imported all packages.

``python -m real_models.worker MODULES`` reads a JSON object per line: the folder, the model's name,
the number of processes to start, and the arguments of the trainer. It answers each with a line:
``""`` if all have trained, and ``weights.safetensors`` is in the folder, or what a failing rank
printed. ``FOLDER OPTIONS MODELS`` train several in this process, a rank that is already started.
"""

import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from safetensors.torch import save_file
from tests.project import PATIENCE, free_port

from fitting import logged, quiet, saved

from . import MODELS
from .base import GLOBAL_BATCH, STEPS
from .operators import import_torchvision

# What a process would import later by itself.
IMPORTED = (
    *("torch.distributed.fsdp", "torch.utils.tensorboard", "torch.distributed.optim"),
    *("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("fairscale.nn.data_parallel", "fairscale.optim"),
)


def import_all(modules: Iterable[str]) -> object:
    """Import what all processes need, and these modules of models.

    Returns:
        what must outlive them.
    """
    operators = import_torchvision() if "images" in modules else None
    for name in (*(f"real_models.{module}" for module in modules), *IMPORTED):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a fork would lose {threads - 1} threads"
    return operators


def serve(requests: Iterable[str]) -> None:
    """Train what is asked for, one after another."""
    for line in requests:
        request = json.loads(line)
        port = str(free_port())
        ranks = {fork(rank, port, **request): rank for rank in range(request["processes"])}
        print(json.dumps(wait(ranks, Path(request["folder"]))), flush=True)


def wait(ranks: dict[int, int], folder: Path) -> str:
    """Wait for all ranks, by process id; give the output of one that fails.

    The others, which may wait for it, are killed.
    """
    output = ""
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status and not output:
            output = (folder / f"{rank}.txt").read_text() or f"rank {rank}: status {status}"
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return output


def fork(rank: int, port: str, folder: str, processes: int, **request: Any) -> int:
    """Fork a process that trains as a rank of several, or alone."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with Path(folder, f"{rank}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        signal.alarm(int(PATIENCE))
        if processes > 1:
            places = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), processes)
            variables = {"MASTER_ADDR": "127.0.0.1", **places, **sizes}
            os.environ |= {name: str(value) for name, value in variables.items()}
        train(Path(folder), **request)
        code = 0
    except trainer.UserError as error:
        print(refused(error))
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


def refused(error: trainer.UserError) -> str:
    return "\n".join(f"refused: {line}" for line in error.problems)


def train_all(folder: Path, options: str, *models: str) -> None:
    """Train one after another; the main process writes ``answers.json``: as :func:`serve` does."""
    answers = dict.fromkeys(models, "")
    for model in models:
        try:
            train(folder / model, model, json.loads(options))
        except trainer.UserError as error:
            answers[model] = refused(error)
    if not int(os.environ["HOROVOD_RANK"]):
        (folder / "answers.json").write_text(json.dumps(answers))


def train(folder: Path, model: str, options: Mapping[str, Any]) -> None:
    """Train for a few steps; the main process writes weights and losses."""
    module, name = MODELS.get(model, f"everyday.{model}").split(".")
    kind = getattr(importlib.import_module(f"real_models.{module}"), name)
    shared = {"max_steps": STEPS, "global_batch_size": GLOBAL_BATCH, "log_every_n_steps": 1}
    shared |= {"loggers": ["csv"], "default_root_dir": folder, "run_name": "run"}
    run = quiet(**{"devices": "auto"} | shared | kind.options | options)
    run.fit(kind())
    if run.global_rank == 0:
        weights = {key: value.clone() for key, value in saved(run.run_directory).items()}
        losses = torch.tensor(logged(run.run_directory, "loss"), dtype=torch.float64)
        save_file(weights | {"losses": losses}, folder / "weights.safetensors")


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1].startswith("/"):
        train_all(Path(sys.argv[1]), *sys.argv[2:])
    else:
        kept = import_all(sys.argv[1:])
        serve(sys.stdin)
        os._exit(0)  # to tear all packages down takes seconds
