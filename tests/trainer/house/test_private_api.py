"""Private API of torch and other packages that the trainer uses, why, and what breaks without it.

A name with a leading underscore is the trainer's own if the trainer defines it; each other one is
listed here. Deleting the folder of an engine deletes the names of :data:`OF_FOLDERS`.
"""

import ast
import importlib
import importlib.util
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.strategies.replicated.dp import replicate
from tests.project import PACKAGE, ROOT
from torch import nn

TRAINER = ROOT / "src" / f"{PACKAGE}_trainer"
# Module, its object, the private name, and why no public one will do.
TORCH = [
    ("torch", "", "_dynamo", "compile: utils.counters has how many graphs were captured"),
    ("torch", "", "_foreach_copy_", "gradients and averages: one kernel for all tensors"),
    ("torch", "", "_foreach_lerp_", "averages of weights: one kernel for all parameters"),
    *(
        ("torch", "Tensor", name, "sparse gradients that wait in a checkpoint, as they were added")
        for name in ("_indices", "_values")
    ),
    ("torch", "cuda", "_get_pynvml_handler", "idle GPUs: what processes use which GPU"),
    ("torch", "cuda", "_is_in_bad_fork", "forked ranks: torch has counted GPUs through CUDA"),
    ("torch.amp", "GradScaler", "_unscale_grads_", "fp16: gradients on several meshes"),
    ("torch.distributed", "Reducer", "_check_reducer_finalized", "ddp: an unused parameter"),
    ("torch.distributed", "Reducer", "_rebuild_buckets", "ddp: a resumed run adds in one order"),
    ("torch.distributed", "distributed_c10d", "_get_default_store", "to ask without collectives"),
    ("torch.distributed.device_mesh", "DeviceMesh", "_get_root_mesh", "meshes: who writes a shard"),
    ("torch.distributed.fsdp", "FSDPModule", "_get_fsdp_state", "fsdp: units that a rank skips"),
    *(
        ("torch.distributed.tensor", parent, name, "fsdp: item() of a DTensor gives a part")
        for parent, name in (
            ("DTensor", "_op_dispatcher"),
            ("DTensor._op_dispatcher", "_custom_op_handlers"),
        )
    ),
    ("torch.ops", "aten", "_local_scalar_dense", "fsdp: it is what item() calls"),
    *(
        ("torch", "Tensor", name, "fsdp: hooks of a gradient, which shards would not have")
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ),
    (
        *("torch.distributed.tensor", "_random", "_rng_tracker"),
        "mesh: dropout of DTensors on GPUs; else it broadcasts rank 0's generator to all ranks",
    ),
    *(
        ("torch.distributed.tensor.debug", "", name, "mesh: a second fit under another mesh")
        for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache")
    ),
    ("torch.distributed.tensor.parallel", "ParallelStyle", "_apply", "mesh: a style with another"),
    ("torch.utils.data", "DataLoader(0)", "_iterator", "workers of the next epoch are new ones"),
    ("torch.nn", "Module", "_apply", "fsdp: move what is not sharded, torchmetrics too"),
    ("torch.nn", "Module", "_replicate_for_data_parallel", "dp: a copy with the module's hooks"),
    (
        *("torch.nn.parallel", "DistributedDataParallel"),
        "_set_params_and_buffers_to_ignore_for_model",
        "ddp: sparse and complex gradients are averaged apart",
    ),
    *(
        ("torch.nn", "BatchNorm1d(1)", name, "children and tensors of a module, and their places")
        for name in ("_modules", "_parameters", "_buffers")
    ),
]
IMPORTED = {
    "torch.distributed.tensor._random",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
}
OTHERS = [
    ("atexit", "", "_clear", "forked ranks: not what their parent is to do at its end"),
    ("atexit", "", "_run_exitfuncs", "ranks that end by os._exit: loggers close first"),
    ("jsonargparse", "ArgumentParser()", "_actions", "the options of a class, with their help"),
    ("multiprocessing.util", "", "_exit_function", "forked ranks: their own processes end"),
    *(
        ("torchmetrics", "MeanMetric()", name, "an unfinished epoch is saved and resumed")
        for name in ("_computed", "_copy_state_dict", "_update_count")
    ),
    ("torchmetrics", "MeanMetric()", "_reductions", "lists are gathered, if their lengths differ"),
    ("torchmetrics", "MeanMetric()", "_sync_dist", "lists are gathered, if their lengths differ"),
]
# By folder of an engine: their tests run them. Objects of them exist only in a run.
OF_FOLDERS = {
    "strategies/deepspeed": {
        *("_zero_init_param", "_WORLD_GROUP", "_release_process_group_references"),
        *("_convert_to_deepspeed_param", "_hp_mapping", "_hp_optimizer_states_linked"),
        "_link_all_hp_params",
    },
    "strategies/fairscale": {"_get_reduce_fn", "_consume_work_handles"},
    "strategies/fsdp": {"_fsdp_param_group", "_param_fqn", "_init_mp_dtypes"},
    "strategies/horovod": {"_allreduce_delay"},
    "strategies/replicated": {"_ddp_ignored", "_opt_called"},
    "strategies/xla": {"torch_xla._internal.pjrt", "torch_xla._internal.tpu"},
    # Without them `plan` falls back to real steps, or fails: test_plan.py.
    "tools/plan": {
        *("torch._subclasses.fake_tensor.FakeTensorMode", "torch._guards.active_fake_mode"),
        *("torch._subclasses.fake_tensor.unset_fake_temporarily", "_local_scalar_dense"),
        *("torch.testing._internal.distributed.fake_pg.FakeStore", "_c10d_functional"),
        *("_local_tensor", "_schema"),
    },
    "tools/doctor": {"torch.utils._python_dispatch.TorchDispatchMode", "_linalg_check_errors"},
}
PUBLIC = {"_exit", "_asdict", "_fields", "_make", "_replace"}  # of os and of named tuples


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, variables, attributes that it sets."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.attr
            case ast.Name(ctx=ast.Store()):
                yield node.id


def used(tree: ast.AST) -> Iterator[str]:
    """Private names that a file reads from objects other than ``self``, or imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute() if is_private(node.attr):
                yield node.attr
            case ast.ImportFrom(level=0, module=str(module)):
                for alias in node.names:
                    name = f"{module}.{alias.name}"
                    if any(is_private(word) for word in name.split(".")):
                        yield name


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in TRAINER.rglob("*.py")}


def test_each_private_name_of_others_is_listed(trees: dict[Path, ast.AST]) -> None:
    listed = {name for _, _, name, _ in TORCH + OTHERS} | IMPORTED | PUBLIC
    present = [names for folder, names in OF_FOLDERS.items() if (TRAINER / folder).is_dir()]
    listed |= set().union(*present)
    private = {name for tree in trees.values() for name in used(tree)}
    ours = {name for tree in trees.values() for name in defined(tree)}
    assert private - ours - listed == set()
    assert listed - private == set()


@pytest.mark.parametrize(("module", "owner", "name", "why"), TORCH + OTHERS)
def test_it_exists(module: str, owner: str, name: str, why: str) -> None:
    holder: Any = importlib.import_module(module)
    attribute, is_made, argument = owner.partition("(")
    holder = operator.attrgetter(attribute)(holder) if owner else holder
    if is_made:
        holder = holder(*map(int, filter(None, [argument.rstrip(")")])))
    assert hasattr(holder, name), f"without it breaks: {why}"


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_it_can_be_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_schedulers_and_fused_optimizers_have_the_attributes_that_are_read() -> None:
    fused = torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)
    assert fused._step_supports_amp_scaling  # else a fused step would read an overflow too early
    inner = torch.optim.lr_scheduler.LinearLR(fused)
    fused.step()
    assert fused._opt_called  # type: ignore[attr-defined]  # else torch warns of schedules of engines
    outer = torch.optim.lr_scheduler.SequentialLR(fused, [inner, inner], [1])
    assert outer._schedulers == [inner, inner]  # else they would step the optimizer of the user


def test_captured_graphs_are_counted() -> None:
    torch.compiler.reset()
    counts = torch._dynamo.utils.counters["stats"]  # else a step that compiles nothing goes unseen
    before = counts["unique_graphs"]
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    assert counts["unique_graphs"] == before + 1


def test_a_replica_has_the_gradients_of_its_module() -> None:
    module = nn.Linear(2, 1)
    replicate(module, torch.device("cpu"), is_first=True)(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None
