"""What a process group is formed of, and what torch's DDP is given."""

import datetime
from typing import Any
from unittest import mock

import pytest
import torch
from my_project_trainer import strategies
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import collectives
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.run import environment
from my_project_trainer.strategies import process_group
from my_project_trainer.strategies.replicated import communication_hooks, ddp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@pytest.mark.parametrize(
    ("asked", "device_type", "backends"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "cpu:gloo,cuda:nccl"),
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("NCCL", "cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo", "cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo, cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:gloo", "cuda", "cpu:gloo,cuda:gloo"),
        ("cpu:mpi,cuda:nccl", "cuda", "cpu:mpi,cuda:nccl"),
        ("gloo", "cuda", "gloo"),
        ("mpi", "cuda", "mpi"),
        # There is no GPU to form NCCL's part on.
        ("nccl", "cpu", "cpu:gloo"),
        ("cuda:nccl", "cpu", "cpu:gloo"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu:gloo"),
        ("gloo", "cpu", "gloo"),
    ],
)
def test_cpu_tensors_always_have_a_backend(asked, device_type, backends):
    assert process_group.backends(asked, device_type) == backends


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, "gloo"),
        ({"TRAINER_BACKEND": "nccl"}, "cpu:gloo"),
        ({"PL_TORCH_DISTRIBUTED_BACKEND": "nccl"}, "cpu:gloo"),
        ({"PL_TORCH_DISTRIBUTED_BACKEND": "nccl", "TRAINER_BACKEND": "gloo"}, "gloo"),
        ({"PL_TORCH_DISTRIBUTED_BACKEND": "gloo", "TRAINER_BACKEND": ""}, "gloo"),
    ],
)
def test_the_variables_name_a_backend(monkeypatch, variables, asked):
    for name in collectives.BACKENDS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = ddp.DDP()
    strategy.device = torch.device("cpu")
    with (
        mock.patch.object(process_group.dist, "init_process_group") as formed,
        mock.patch.object(process_group.rendezvous, "connect_store"),
    ):
        strategy.init_process_group(Layout(), strategy.device)
    assert formed.call_args.args == (asked,)


@pytest.mark.parametrize(
    ("device", "backend", "bound", "seconds"),
    [
        ("cuda:1", "", torch.device("cuda:1"), 630),
        ("cuda:1", "cuda:gloo", None, 630),  # several ranks on a GPU: gloo has nothing to connect
        ("cpu", "nccl", None, 600),
    ],
)
def test_nccl_is_bound_to_its_gpu_and_reports_after_our_timer(
    monkeypatch, device, backend, bound, seconds
):
    monkeypatch.setenv("TRAINER_BACKEND", backend)
    strategy = ddp.DDP(timeout_seconds=600)
    strategy.device = torch.device(device)
    with (
        mock.patch.object(process_group.dist, "init_process_group") as formed,
        mock.patch.object(process_group.rendezvous, "connect_store") as joined,
    ):
        strategy.init_process_group(Layout(), strategy.device)
    assert formed.call_args.kwargs["device_id"] == bound
    assert formed.call_args.kwargs["timeout"] == datetime.timedelta(seconds=seconds)
    assert joined.call_args.args[1] == datetime.timedelta(seconds=600)


def form_pipelines(strategy: Any) -> None:
    """Form the groups of a pipeline, and of its replicas."""
    with mock.patch.object(process_group.ProcessGroupStrategy, "init_process_group"):
        strategy.init_process_group(strategy.layout, strategy.device)
    strategy.processes.among([0, 1])
    strategy.processes.across_replicas()


@pytest.mark.parametrize(
    ("name", "options", "form"),
    [
        ("hsdp", {"shard_size": 2}, lambda strategy: strategy.make_mesh()),
        ("mesh", {"data": 2, "shard": 2, "tensor": 2}, lambda strategy: strategy.make_mesh()),
        ("sequential", {"stages": 2}, form_pipelines),
    ],
)
def test_every_group_reports_after_our_timer(monkeypatch, name, options, form):
    strategy: Any = strategies.create(name, {"timeout_seconds": 600, **options})
    strategy.layout, strategy.device = Layout(0, 0, 8, 8), torch.device("cuda:0")
    strategy.replicas(8, 1)
    timeouts = []

    def create(*ranks: object, timeout: datetime.timedelta) -> tuple[None, None]:
        timeouts.append(timeout.total_seconds())
        return None, None

    for function in ("new_group", "new_subgroups_by_enumeration"):
        monkeypatch.setattr(torch.distributed, function, create)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 8)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *group: 0)
    monkeypatch.setattr(DeviceMesh, "from_group", mock.MagicMock())
    form(strategy)
    assert timeouts
    assert set(timeouts) == {630}


@pytest.mark.usefixtures("group")
def test_groups_for_the_cpu_can_be_added_to_one_that_is_bound_to_a_gpu() -> None:
    """As a checkpoint's; torch would split it from the first group, which gloo does not support."""
    dist = torch.distributed
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=9))
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["TRAINER_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND"])
def test_several_backends_are_named_with_their_devices(name: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        environment.check(several=False, environment={name: "gloo,gloo"})
    line = f"{name}='gloo,gloo': '' is not a device type; write it as in 'cpu:gloo,cuda:nccl'"
    assert str(raised.value) == line


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_ddp_is_given_no_devices(device: str) -> None:
    """Given one, it walks through each batch again, and fails on a defaultdict."""
    strategy: Any = ddp.DDP(find_unused_parameters=True)
    strategy.device, strategy.devices = torch.device(device), [torch.device(device)]
    with mock.patch.object(ddp, "DistributedDataParallel") as made:
        strategy.wrap(nn.Linear(2, 2))
    arguments: dict[str, Any] = made.call_args.kwargs
    assert arguments.get("device_ids") is None
    assert arguments["find_unused_parameters"] is True


def test_what_powersgd_has_left_out_comes_back_to_the_device_of_the_gradients() -> None:
    made = [communication_hooks.register(mock.Mock(), "powersgd", 1, 1000) for _ in range(2)]
    made[0].error_dict[0] = torch.ones(3)
    saved = communication_hooks.state(made[0])
    communication_hooks.load_state(made[1], torch.device("meta"), saved)
    assert made[1].error_dict[0].device.type == "meta"
    assert list(made[1].error_dict[0].shape) == [3]
