"""What a process group is formed of, and what torch's DDP is given."""

from typing import Any
from unittest import mock

import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.run import environment
from my_project_trainer.strategies import process_group
from my_project_trainer.strategies.replicated import communication_hooks, ddp
from torch import nn


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
def test_cpu_tensors_always_have_a_backend(
    asked: str | None, device_type: str, backends: str
) -> None:
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
def test_the_variables_name_a_backend(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asked: str
) -> None:
    for name in process_group.BACKENDS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = ddp.DDP()
    layout = Layout()
    with (
        mock.patch.object(process_group.dist, "init_process_group") as formed,
        mock.patch.object(process_group.rendezvous, "connect_store"),
    ):
        strategy.init_process_group(layout, torch.device("cpu"))
    assert formed.call_args.args == (asked,)


@pytest.mark.parametrize("name", ["TRAINER_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND"])
def test_several_backends_are_named_with_their_devices(name: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        environment.check(several=False, environment={name: "gloo,gloo"})
    assert str(raised.value) == (
        f"{name}='gloo,gloo': name the device type of each of several backends, as in "
        "'cpu:gloo,cuda:nccl'"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_ddp_is_given_no_devices(device: str) -> None:
    """Given one, it walks through each batch again, and fails on a defaultdict."""
    strategy = ddp.DDP(static_graph=True)
    strategy.device, strategy.devices = torch.device(device), [torch.device(device)]
    with mock.patch.object(ddp, "DistributedDataParallel") as made:
        strategy.wrap(nn.Linear(2, 2))
    given: dict[str, Any] = made.call_args.kwargs
    assert given.get("device_ids") is None
    assert given["static_graph"] is True


def test_what_powersgd_has_left_out_comes_back_to_the_device_of_the_gradients() -> None:
    saved = communication_hooks.CommunicationHook("powersgd")
    hook = communication_hooks.CommunicationHook("powersgd")
    for each in (saved, hook):
        each.register(mock.Mock())
    saved._powersgd.error_dict[0] = torch.ones(3)
    hook.load_state(saved.state(), torch.device("meta"))
    assert hook._powersgd.error_dict[0].device.type == "meta"
    assert list(hook._powersgd.error_dict[0].shape) == [3]
