"""Each cause that a report names is planted in a real fit, and found; a healthy fit has none."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from my_project_trainer.callbacks import Callback, Profile
from my_project_trainer.launch import start
from my_project_trainer.tools.report import checks, reading
from tests.project import succeed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fitting
from fake_clock import Clock
from report_subject import Model, fit

LOADER, CHECKPOINTS = "Slow loader", "Checkpoints too often"
RANK, BATCH, WAITS = "Slow rank", "Small batch", "Step that waits for the device"


def examined(run_directory: Path) -> dict[str, checks.Check]:
    return {check.cause: check for check in checks.check(reading.read(run_directory))}


def advised(run_directory: Path) -> set[str]:
    return {cause for cause, check in examined(run_directory).items() if check.advice is not None}


class Samples(Dataset[Tensor]):
    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        self.clock.now += self.seconds
        return torch.ones(4)


class Timed(Model):
    def __init__(self, clock: Clock, sample: float) -> None:
        super().__init__(width=4)
        self.clock, self.sample = clock, sample

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += 8
        return super().training_step([batch], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 30

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(self.clock, self.sample), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(self.clock, 0.0), batch_size=16)


class SlowSave(Callback):
    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def state_dict(self) -> dict[str, Any]:
        self.clock.now += self.seconds
        return {"seconds": self.seconds}


def timed(clock: Clock, folder: Path, sample: float, save: float, **options: Any) -> Path:
    """The run of a fit of eight steps, with a checkpoint after each, and a validation."""
    shared = {"max_steps": 8, "val_every_n_steps": 4, "log_every_n_steps": 2, "loggers": ["csv"]}
    shared |= {"checkpoint_every_n_steps": 1, "callbacks": [SlowSave(clock, save)]}
    fitting.fit(Timed(clock, sample), folder, **shared | options)
    (folder / "run" / "config.yaml").write_text("trainer:\n  checkpoint_every_n_steps: 1\n")
    return folder / "run"


def test_a_slow_loader_is_found(tmp_path: Path, clock: Clock) -> None:
    run = timed(clock, tmp_path, sample=1.5, save=0.0)
    assert advised(run) == {LOADER}
    # Two samples of a batch take 3 of 11 seconds.
    assert "waited 0.27 of their time" in examined(run)[LOADER].measured
    assert "1.4 times as fast" in str(examined(run)[LOADER].advice)
    with (run / "speed.csv").open("a") as file:  # as SystemMonitor writes it
        file.write("8,0,system/gpu_percent,97.0\n")
    assert advised(run) == set()


def test_checkpoints_that_are_saved_too_often_are_found(tmp_path: Path, clock: Clock) -> None:
    run = timed(clock, tmp_path, sample=0.1, save=2.0)
    assert advised(run) == {CHECKPOINTS}
    spent = reading.read(run).spent
    # The last checkpoint follows the last logged step, and so does a validation.
    assert (spent.checkpoint, spent.validation) == (pytest.approx(14.0), 30.0)
    assert (spent.training, spent.data) == (pytest.approx(64.0), pytest.approx(1.6))
    advice = str(examined(run)[CHECKPOINTS].advice)
    share = 14.0 / (14.0 + 30.0 + 65.6)
    assert f"took {share:.0%} of the time" in advice
    # Less often by as much as 14 of 95.6 seconds exceed 2 of 100.
    assert f"checkpoint_every_n_steps {round(14.0 / 95.6 / 0.02)} instead of 1" in advice


def test_nothing_is_advised_where_nothing_is_wrong(tmp_path: Path, clock: Clock) -> None:
    run = timed(clock, tmp_path, sample=0.1, save=0.2)
    assert advised(run) == set()
    assert examined(run)[BATCH].measured.startswith("not examined: no profile")
    # Nor a few seconds of a short run, whatever their share is.
    assert advised(timed(clock, tmp_path / "short", sample=1.5, save=1.0, max_steps=2)) == set()


def test_a_small_batch_is_found_by_the_profile_and_a_large_one_is_fine(tmp_path: Path) -> None:
    fit(tmp_path / "run", Model(width=8), batch=1)
    run = reading.read(tmp_path / "run")
    (trace,) = run.traces
    assert len(trace.steps) == 3
    assert min(step.seconds[name] for step in trace.steps for name in ("compute", "data")) > 0
    # How long a step computes depends on what else the machine does.
    for idle, causes in ((0.4, {BATCH}), (0.2, set())):
        seconds = dict.fromkeys(trace.steps[0].seconds, 0.0) | {"compute": 1 - idle, "other": idle}
        steps = [step._replace(seconds=seconds) for step in trace.steps]
        examined = checks.check(run._replace(traces=[trace._replace(steps=steps)]))
        advice = {check.cause: check.advice for check in examined if check.advice is not None}
        assert {cause for cause in advice if "(now 1 samples a step)" in advice[cause]} == causes
        assert {*advice} == causes


def test_a_checkpoint_in_a_recorded_step_is_no_computation(tmp_path: Path) -> None:
    fit(tmp_path / "run", Model(width=8), batch=1, checkpoint_every_n_steps=1)
    (trace,) = reading.read(tmp_path / "run").traces
    assert min(step.seconds["checkpoint"] / step.total for step in trace.steps) > 0.3


def on_two_ranks(folder: Path, model: Callable[[], Model], **options: Any) -> None:
    """A fit with ddp on two processes."""
    more = {"strategy": "ddp", "devices": 2, **options}
    start.run_in_processes("fork", 2, lambda: fit(folder, model(), 4, **more), {})


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_found_by_the_profiles_of_all(tmp_path: Path, slow: int) -> None:
    on_two_ranks(tmp_path / "run", lambda: Model(width=8, slow_rank=slow))
    assert f"wait for rank {slow}" in str(examined(tmp_path / "run")[RANK].advice)
    waiting = reading.read(tmp_path / "run").traces[1 - slow]
    assert fmean(step.seconds["communication"] for step in waiting.steps) > 0.1


def test_a_slow_rank_needs_the_profiles_of_all(tmp_path: Path) -> None:
    slow = {"width": 8, "slow_rank": 1}
    on_two_ranks(tmp_path / "run", lambda: Model(**slow), callbacks=[Profile()])
    check = examined(tmp_path / "run")[RANK]
    assert check.advice is None
    assert "only with profiles of all ranks" in check.measured


@pytest.mark.slow
def test_a_step_that_waits_for_the_device_is_found(tmp_path: Path) -> None:
    """On the emulated GPU, in a process of its own; its waits are recorded as CUDA's are."""
    succeed(["-m", "report_device_subject", tmp_path])
    assert {path.name: advised(path) & {WAITS} for path in tmp_path.iterdir()} == {
        "reads": {WAITS},
        "healthy": set(),
        "scaled": set(),  # the gradient scaler waits once for each optimizer
    }
    assert "at least 1 time in each step" in str(examined(tmp_path / "reads")[WAITS].advice)


def trace_of_a_gpu(waits: list[float]) -> dict[str, Any]:
    """A step of 100 ms as CUDA records it, with waits of 1 ms that begin at these milliseconds."""

    def event(kind: str, name: str, start: float, duration: float) -> dict[str, Any]:
        fields = {"ph": "X", "cat": kind, "name": name, "tid": 1}
        return {**fields, "ts": start * 1e3, "dur": duration * 1e3}

    return {
        "traceEvents": [
            event("user_annotation", "ProfilerStep#2", 0, 100),
            event("gpu_user_annotation", "ProfilerStep#2", 5, 100),
            event("user_annotation", "enumerate(DataLoader)#Iter.__next__", 0, 10),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 8, 4),
            event("cpu_op", "aten::addmm", 12, 60),
            event("kernel", "ampere_sgemm_128x64_tn", 20, 40),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 20),
            event("gpu_user_annotation", "Optimizer.step#AdamW.step", 70, 10),
            event("kernel", "multi_tensor_apply_kernel", 70, 10),
            event("user_annotation", "trainer:checkpoint", 85, 10),
            *(event("cuda_runtime", "cudaStreamSynchronize", start, 1) for start in waits),
        ]
    }


def test_a_gpu_s_own_timeline_counts(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    trace = tmp_path / "profile" / "rank-00000.1.pt.trace.json"
    trace.write_text(json.dumps(trace_of_a_gpu([30.0, 86.0])))
    (tmp_path / "run.json").write_text('{"attempts": [{"device": "cuda:0"}]}')
    (step,) = reading.read(tmp_path).traces[0].steps
    assert {name: round(seconds * 1e3, 6) for name, seconds in step.seconds.items()} == {
        "data": 8.0,
        "copy": 4.0,
        "compute": 40.0,
        "communication": 10.0,  # the rest is hidden by computation
        "optimizer": 10.0,
        "checkpoint": 10.0,
        "validation": 0.0,
        "other": 18.0,
    }
    assert (step.waits, step.waited) == (1, pytest.approx(1e-3))  # the other is a checkpoint's
    assert advised(tmp_path) == {WAITS}
    trace.write_text(json.dumps(trace_of_a_gpu([86.0])))
    assert advised(tmp_path) == set()
