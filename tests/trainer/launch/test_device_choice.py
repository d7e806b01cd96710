"""Which GPU a process takes, as it is started and as many as there are."""

from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer import errors


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr(torch.version, "cuda", None)  # and ask no driver how old it is
    return see


@pytest.fixture
def srun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have this process be a task of a step on one node."""

    def step(task: int, tasks: int) -> None:
        values = {
            **{"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"},
            **{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_JOB_ID": "1"},
            **{"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks)},
            **{"SLURM_STEP_NODELIST": "node1", "TRAINER_CLUSTER": "srun"},
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return step


def chosen_device(**options: Any) -> torch.device:
    checked = trainer.Trainer(max_steps=1, accelerator="gpu", **options)._plan
    assert len(checked.node_devices) == 4
    device: torch.device = checked.device
    return device


@pytest.mark.parametrize("value", ["auto", 4, -1])
@pytest.mark.parametrize("task", [0, 3])
def test_a_task_that_sees_its_own_gpu_alone_takes_it(gpus, srun, value, task):
    gpus(1)
    srun(task, 4)
    assert chosen_device(devices=value) == torch.device("cuda", 0)


@pytest.mark.parametrize("value", ["auto", 4, -1, [0, 1, 2, 3]])
def test_a_task_that_sees_all_gpus_takes_the_one_of_its_place(gpus, srun, value):
    gpus(4)
    srun(3, 4)
    assert chosen_device(devices=value) == torch.device("cuda", 3)


def problems(**options: Any) -> list[str]:
    with pytest.raises(errors.ConfigurationError) as raised:
        trainer.Trainer(max_steps=1, **{"accelerator": "gpu", **options})
    lines: list[str] = raised.value.problems
    return lines


def test_indices_mean_nothing_to_a_task_that_sees_its_own_gpu_alone(gpus: Any, srun: Any) -> None:
    gpus(1)
    srun(0, 2)
    assert "devices=[0, 1]: there is no device 1 here (known: 0 to 0)" in problems(devices=[0, 1])


@pytest.mark.parametrize("value", ["auto", 8])
def test_more_processes_than_gpus_are_refused(gpus: Any, srun: Any, value: Any) -> None:
    gpus(4)
    srun(7, 8)
    problem = "srun started 8 processes on this node, which has 4 GPUs for them"
    assert problems(devices=value) == [f"{problem}: start 4, or set accelerator='cpu'"]


@pytest.mark.parametrize("value", ["auto", 2])
def test_ranks_that_others_start_do_not_choose_idle_gpus_each_alone(gpus, srun, value):
    gpus(4)
    srun(0, 2)
    assert problems(devices=value, auto_select_gpus=True) == [
        "auto_select_gpus: srun started 2 processes on this node, each of which would choose by "
        "itself; name the GPUs in CUDA_VISIBLE_DEVICES"
    ]
