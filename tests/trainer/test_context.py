"""Context parallelism equals one process, with sequences that the ranks do not divide."""

import json
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.strategies.model_parallel.mesh import context
from tests.project import PATIENCE, run, start
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader

from context_subject import CASES, STEPS, train
from context_worker import LENGTHS
from torch_versions import quiet_gloo

RUNS = {
    "two": ({"context": 2}, 2, CASES),
    "four": ({"context": 4}, 4, ("not-divisible", "ignored")),
    "replicas": ({"data": 2, "context": 2}, 4, ("not-divisible",)),
    "shards": ({"shard": 2, "context": 2, "unit_classes": ["Block"]}, 4, ("not-divisible",)),
    "tensor": ({"tensor": 2, "context": 2}, 4, ("divisible", "not-divisible")),
}
PAIRS = [
    pytest.param(name, case, marks=pytest.mark.slow)
    for name, (_, _, cases) in RUNS.items()
    for case in cases
]


@quiet_gloo
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_slices_attend_as_the_whole(tmp_path: Path, processes: int) -> None:
    ranks = [
        start(["-m", "context_worker", "compare", str(rank), str(processes), tmp_path])
        for rank in range(processes)
    ]
    try:
        deadline = time.monotonic() + PATIENCE
        ended = [each.communicate(timeout=deadline - time.monotonic()) for each in ranks]
    finally:
        for each in ranks:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.communicate()
    assert [each.returncode for each in ranks] == [0] * processes, [error for _, error in ended]
    found = [json.loads(output) for output, _ in ended]
    of_ranks = zip(*(printed["work"] for printed in found), strict=True)
    for length, work in zip(LENGTHS, of_ranks, strict=True):
        assert max(work) - min(work) <= (2 * length if length % (2 * processes) else 0)
    for printed in found:
        assert len(printed["differences"]) == 28
        assert max(printed["differences"].values()) < 1e-12
        assert set(printed["refusals"]) == {"unused", "unknown", "ambiguous", "two masks"}
        assert "training_step has split no sequence" in printed["refusals"]["unused"]


@pytest.mark.filterwarnings("ignore")  # on a CPU, torch says that it has no such kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_bias_that_gpus_use_is_the_mask_that_cpus_use(dtype: torch.dtype) -> None:
    whole = torch.randn(3, 2, 4, 11, 8, generator=torch.Generator().manual_seed(0)).double()
    expected = scaled_dot_product_attention(*whole, is_causal=True)[..., 6:10, :]
    query, (key, value) = whole[0][..., 6:10, :], whole[1:, ..., :10, :]
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        found = context._lower_right(query, key, value)
    assert found.dtype == dtype
    assert float((found - expected).abs().max()) < (1e-12 if dtype == torch.float64 else 0.05)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the cases under a mesh once; ``one``: in one process."""

    @cache
    def result(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        options, devices, cases = RUNS.get(name, ({}, 1, CASES))
        how = {"devices": devices}
        how |= {"strategy": "mesh", "strategy_options": options} if options else {}
        saved = folder if name == "one" else result("one")
        done = run(["-m", "context_subject", folder, json.dumps(how), json.dumps([*cases]), saved])
        assert done.returncode == 0, done.stderr
        return folder

    return result


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_mesh_equals_one_process(results: Any, name: str, case: str) -> None:
    own, one = results(name), results("one")
    ours, theirs = (json.loads((each / f"{case}.json").read_text()) for each in (own, one))
    weights, resumed = (read(own / each) for each in (case, f"{case}-resumed"))
    assert all(weights[key].equal(resumed[key]) for key in weights)
    if CASES[case].dropout:
        return
    tolerance = CASES[case].tolerance
    for stage in ("fit", "test"):
        assert ours[stage] == pytest.approx(theirs[stage], rel=0, abs=tolerance)
    assert ours["predicted"] == theirs["predicted"]
    for way in (case, f"{case}-ported"):
        assert_close(read(own / way), read(one / case), tolerance)


@pytest.mark.slow
def test_one_process_resumes_what_two_have_saved(results: Any, apart: None, tmp_path: Path) -> None:
    case, saved = CASES["not-divisible"], results("two") / "not-divisible-half"
    train(case, tmp_path, {"devices": 1}, run_name="ported", resume=str(saved))
    assert_close(read(tmp_path / "ported"), read(results("one") / "not-divisible"), case.tolerance)


def read(directory: Path) -> dict[str, Tensor]:
    """The weights in a run's last checkpoint, which is that of the last step."""
    found = checkpoint.Checkpoint(checkpoint.resolve(directory))
    assert found.step == STEPS
    return dict(found.state()["model"])


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Weights of two runs are equal within a tolerance."""
    assert ours.keys() == theirs.keys()
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) <= tolerance


class Plain(trainer.TrainingModule):
    """Does not split its sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(8, 4), batch_size=2)


def test_what_context_parallelism_cannot_train_is_refused_before_any_process_starts(
    nothing_runs: None,
) -> None:
    shared: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 1}
    shared |= {"strategy": "mesh", "strategy_options": {"context": 2}}
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(**shared).fit(Plain())
    assert str(raised.value) == (
        "strategy_options.context=2: Plain does not split its sequences; use trainer.sequence in "
        "it and set splits_sequences = True, or set context=1"
    )
    with pytest.raises(trainer.ConfigurationError, match="each rank of a tensor or context group"):
        trainer.Trainer(**shared, sync_batchnorm=True)
