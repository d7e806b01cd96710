"""Which devices a process computes on."""

from dataclasses import replace

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.launch.cluster import Layout

GPUS = tuple(torch.device("cuda", index) for index in (0, 2, 3))


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork", "ddp_zero1"])
def test_a_started_rank_takes_its_own_device(strategy):
    run = trainer.Trainer(accelerator="cpu", devices=3, strategy=strategy, max_steps=1)
    parent = replace(run._plan, node_devices=GPUS)
    for rank in range(3):
        layout = Layout(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
        assert replace(parent, layout=layout).devices == (GPUS[rank],)


@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_a_process_alone_on_its_node_takes_all(strategy):
    run = trainer.Trainer(accelerator="cpu", devices=3, strategy=strategy, max_steps=1)
    assert replace(run._plan, node_devices=GPUS).devices == GPUS
