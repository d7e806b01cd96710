"""Has models trained by a worker, and compares what came of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.project import environment
from torch import Tensor

from .base import STEPS


@dataclass(frozen=True)
class Way:
    """How a strategy is started.

    Args:
        models: that CI tries on each push; the others are exhaustive.
        processes: that are started for it; others it starts by itself.
        parts: into which it cuts a batch.
        options: of the strategy.
        engine: that it needs.
    """

    models: tuple[str, ...]
    processes: int = 2
    parts: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "torch"


@contextmanager
def asking(modules: Sequence[str], *folders: str) -> Iterator[Any]:
    """A function that has a model of these modules trained; folders have their packages."""
    variables = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    # pyarrow's allocator would start a thread, which a fork loses.
    variables["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    variables["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *folders])
    command = [sys.executable, "-m", "real_models.worker", *modules]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(variables), **pipes) as worker:

        def asked(folder: Path, model: str, processes: int, options: dict[str, Any]) -> str:
            request = {"folder": str(folder), "model": model, "processes": processes}
            print(json.dumps({**request, "options": options}), file=worker.stdin, flush=True)
            answer = worker.stdout.readline()
            assert answer, "the worker has ended"
            return json.loads(answer)

        yield asked  # the worker ends with its standard input


def difference(
    found: dict[str, Tensor], expected: dict[str, Tensor], bound: float, *, buffers: bool
) -> float:
    """Largest of any weight or loss. Running statistics are those of the first parts alone."""
    assert found.keys() == expected.keys()
    losses = expected["losses"]
    assert len(losses) == STEPS
    assert losses.max() < 8
    assert (losses.max() - losses.min()) > 100 * bound
    names = [name for name in found if buffers or not re.search("running_|num_batches", name)]
    pairs = [(found[name].double(), expected[name].double()) for name in names]
    assert all(ours.shape == theirs.shape for ours, theirs in pairs)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs if ours.numel())
