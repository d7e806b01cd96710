"""Has models trained by a worker, and compares what came of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
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


def cells(ways: Mapping[str, Way], models: Iterable[str]) -> Iterator[Any]:
    """All strategies and models; each push tries few models of each strategy."""
    for (strategy, way), model in product(ways.items(), models):
        marks = [pytest.mark.needs(way.engine)] if way.engine != "torch" else []
        marks += [] if model in way.models else [pytest.mark.exhaustive]
        yield pytest.param(strategy, model, marks=marks)


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


def references(ask: Any, folders: pytest.TempPathFactory) -> Any:
    """A function that trains a model in one process, once per number of parts of a batch."""

    @cache
    def trained(model: str, parts: int) -> dict[str, Tensor]:
        folder = folders.mktemp("reference-")
        options = {"devices": 1, "accumulate_grad_batches": parts, "sync_batchnorm": False}
        assert ask(folder, model, 1, options) == ""
        return load_file(folder / "weights.safetensors")

    return trained


def difference(
    weights: dict[str, Tensor], expected: dict[str, Tensor], bound: float, *, buffers: bool
) -> float:
    """Largest of any weight or loss. Running statistics are those of the first parts alone."""
    assert weights.keys() == expected.keys()
    losses = expected["losses"]
    assert len(losses) == STEPS
    assert losses.max() < 8
    assert (losses.max() - losses.min()) > 100 * bound
    names = [name for name in weights if buffers or not re.search("running_|num_batches", name)]
    pairs = [(weights[name].double(), expected[name].double()) for name in names]
    assert all(ours.shape == theirs.shape for ours, theirs in pairs)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs if ours.numel())
