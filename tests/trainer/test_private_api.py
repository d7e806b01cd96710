"""Private API of torch that strategies use, why, and what breaks without it."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from my_project_trainer.strategies.replicated.dp import replicate
from tests.project import PACKAGE, ROOT
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

FOLDERS = ("*.py", "fsdp/*.py", "replicated/*.py", "gradients/*.py")
# The object that has it, its name, and why no public one will do.
USED = [
    (torch.amp.GradScaler, "_unscale_grads_", "fp16: gradients on several meshes are unscaled"),
    (torch, "_foreach_copy_", "averages: one kernel for all parameters"),
    (FSDPModule, "_get_fsdp_state", "fsdp: ranks that use other parameters; groups are dropped"),
    (nn.Module, "_apply", "fsdp: move what is not sharded, also the state of torchmetrics"),
    (nn.Module, "_replicate_for_data_parallel", "dp: a copy of a module, with its hooks"),
    (
        DistributedDataParallel,
        "_set_params_and_buffers_to_ignore_for_model",
        "ddp: sparse and complex gradients are averaged apart",
    ),
    (dist.Reducer, "_check_reducer_finalized", "ddp: an unused parameter is named in its step"),
    (dist.Reducer, "_rebuild_buckets", "ddp: a resumed run adds in the same order"),
    (dist.distributed_c10d, "_get_default_store", "ranks that use other parameters ask for it"),
    (nn.BatchNorm1d(1), "_modules", "dp: children of a replica are replaced"),
    (nn.BatchNorm1d(1), "_parameters", "dp: parameters of a replica are no leaves"),
    (nn.BatchNorm1d(1), "_buffers", "dp: buffers of a replica are copies"),
]
# Of objects that exist only in a run; `test_sharded_parts`, `test_process_group` and `test_ranks`
# read and set them.
OF_RUNS = {"_fsdp_param_group", "_param_fqn", "_ddp_ignored"}
# Of the trainer itself, by way of super().
OWN = {"_connect", "_wrap", "_step_optimizer"}


@pytest.mark.parametrize(("owner", "name", "why"), USED, ids=[name for _, name, _ in USED])
def test_torch_has_what_strategies_use(owner: Any, name: str, why: str) -> None:
    assert hasattr(owner, name), f"without it breaks: {why}"


def test_no_other_private_name_is_used() -> None:
    strategies = ROOT / "src" / f"{PACKAGE}_trainer" / "strategies"
    text = "\n".join(path.read_text() for each in FOLDERS for path in strategies.glob(each))
    used = set(re.findall(r"(?<!\bself)\.(_[a-z]\w*)", text))
    assert used - OWN == {name for _, name, _ in USED} | OF_RUNS


def test_schedulers_and_fused_optimizers_have_the_attributes_that_are_read() -> None:
    parameter = nn.Parameter(torch.ones(1))
    fused = torch.optim.Adam([parameter], fused=True)
    assert fused._step_supports_amp_scaling  # else a fused step would read an overflow too early
    inner = torch.optim.lr_scheduler.LinearLR(fused)
    outer = torch.optim.lr_scheduler.SequentialLR(fused, [inner, inner], [1])
    assert outer._schedulers == [inner, inner]  # else they would step the optimizer of the user


def test_a_replica_has_the_gradients_of_its_module() -> None:
    module = nn.Linear(2, 1)
    replicate(module, torch.device("cpu"), is_first=True)(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None
