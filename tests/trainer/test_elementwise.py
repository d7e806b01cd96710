"""Optimizers that look beyond what a process steps are refused where parameters are cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.checkpoint import reading
from my_project_trainer.strategies.elementwise import problems_of
from tests.project import missing, require, run

import cut_subject

pytestmark = pytest.mark.timeout(600)
CPU = torch.device("cpu")
BY_ELEMENT = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
ELEMENT, PARAMETER = "which computes an element from others", "which computes a parameter from"


def reasons(made: torch.optim.Optimizer) -> list[str]:
    """Why it cannot step slices of parameters, and some of the parameters."""
    found = (problems_of([made], cut, CPU) for cut in ("elements", "parameters"))
    return ["".join(each) for each in found]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_torch_s_elementwise_optimizers_step_parts(name: str) -> None:
    made = (
        getattr(torch.optim, name)(parameters(), lr=0.01, weight_decay=0.1)
        if (name != "Rprop")
        else torch.optim.Rprop(parameters())
    )
    state = torch.get_rng_state()
    assert reasons(made) == ["", ""]
    assert torch.equal(state, torch.get_rng_state())
    assert all(not values.get("exp_avg", torch.zeros(1)).any() for values in made.state.values())


@pytest.mark.parametrize(
    ("made", "of_elements", "of_parameters"),
    [
        (torch.optim.Adafactor(parameters()), ELEMENT, ""),
        (torch.optim.Muon(parameters()), ELEMENT, ""),
        (cut_subject.Lars(parameters()), ELEMENT, ""),
        (cut_subject.Lars(parameters(), lr=0.0), ELEMENT, ""),  # a warm-up
        (cut_subject.Lamb(parameters()), ELEMENT, PARAMETER),
        (cut_subject.Marked(parameters()), "", ""),
        (cut_subject.Noisy(parameters(), lr=0.1), ELEMENT, PARAMETER),
        (cut_subject.Lion(parameters(), lr=1e-6), "", ""),
        (cut_subject.Strange(parameters(), "name"), "which cannot be tested", "which cannot be"),
        (
            torch.optim.SGD([{"params": parameters(), "momentum": 0.9}], lr=torch.tensor(0.0)),
            "",
            "",
        ),
        (torch.optim.AdamW([("weight", parameters()[0])], fused=True), "", ""),
        (torch.optim.SparseAdam(parameters()), "", ""),
    ],
)
def test_says_what_an_optimizer_looks_at(
    made: torch.optim.Optimizer, of_elements: str, of_parameters: str
) -> None:
    for expected, found in zip((of_elements, of_parameters), reasons(made), strict=True):
        assert expected in found
        assert bool(expected) == bool(found)


def fitted(folder: Path, devices: int, *names: str) -> dict[str, str]:
    """The errors of fits; "" for those that train."""
    done = run(["-m", "cut_subject", folder, str(devices), *names])
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    assert list(found) == list(names)
    return found


def weights(folder: Path, name: str) -> torch.Tensor:
    found = reading.Checkpoint(reading.resolve(folder / name.replace(":", "-")))
    state: Any = found.state()
    return torch.cat([state["model"][key].flatten() for key in sorted(state["model"])])


@pytest.mark.parametrize(
    ("engine", "equal", "refused"),
    [
        (
            "torch",
            ("ddp_zero1:lars", "sequential:adafactor", "sequential:early", "ddp_zero1:lion"),
            ("ddp_zero1:lamb", "sequential:lamb"),
        ),
        pytest.param(
            "fairscale",
            ("ddp_sharded:lars", "fairscale_fsdp:early", "fairscale_fsdp:adagrad"),
            ("ddp_sharded:lamb", "fairscale_fsdp:lars", "fairscale_fsdp:adafactor"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepspeed",
            tuple(f"deepspeed_stage_{n}:{name}" for n in (1, 3) for name in ("lion", "adagrad")),
            ("deepspeed_stage_1:lars", "deepspeed_stage_3:lamb", "deepspeed_stage_1:early"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_optimizers_that_are_not_refused_equal_one_process(
    tmp_path: Path, engine: str, equal: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    if engine != "torch":
        require(missing(engine))
    found = fitted(tmp_path, 2, *equal, *refused)
    assert {name: error for name, error in found.items() if error}.keys() == set(refused)
    for name in refused:
        reason = "has a state" if name.endswith("early") else "computes a"
        assert f"gave {type_of(name)}, which {reason}" in found[name]
    alone = dict.fromkeys(f"single_device:{name.split(':')[1]}" for name in equal)
    assert set(fitted(tmp_path, 1, *alone).values()) == {""}
    for name in equal:
        expected = weights(tmp_path, f"1-single_device-{name.split(':')[1]}")
        assert float((weights(tmp_path, f"2-{name}") - expected).abs().max()) < 1e-5, name


def type_of(name: str) -> str:
    return type(cut_subject.OPTIMIZERS[name.split(":")[1]](parameters())).__name__
