"""Prepare a process for DeepSpeed, and clean up after it.

DeepSpeed is imported before there is a process group, and uses the trainer's process group.
"""

import contextlib
import importlib
import logging
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.file_baton import FileBaton

from ...errors import UserError
from ...launch import output
from ...launch.cluster import Layout
from ..gradients.averaging import FixedOrder
from ..optimizers import UNREACHED

_OF_STAGE_3 = {  # attributes that stage 3 sets on every module; the first two refer to its engine
    *("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "all_parameters"),
    *("ds_id", "ds_grads_remaining", "ds_recompute_parameters", "ds_external_parameters"),
    *("ds_inflight_param_registry", "_original_parameters", "_external_params"),
}
_ACCELERATOR = "DS_ACCELERATOR"
_SECONDS_FOR_LOCK = 60.0


def load(device: torch.device, layout: Layout) -> Any:
    """Import DeepSpeed for a device: by itself, it always selects a GPU if there is one."""
    # Ninja compiles extensions; find it even if Python was called by path.
    scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = path + os.pathsep + scripts
    os.environ[_ACCELERATOR] = device.type
    os.environ["LOCAL_RANK"] = str(layout.local_rank)
    baton: Any = FileBaton
    baton.wait = _wait
    return _imported()


def _wait(baton: FileBaton, wait: Callable[[FileBaton], None] = FileBaton.wait) -> None:
    """Wait for another process that compiles an extension; its lock is named after a minute."""
    line = (
        f"note: waiting for {baton.lock_file_path}: another process compiles an extension; if none "
        "does, one was killed: remove this file"
    )
    timer = threading.Timer(_SECONDS_FOR_LOCK, partial(output.print_lines, line, error=True))
    timer.daemon = True
    timer.start()
    try:
        wait(baton)
    finally:
        timer.cancel()


def _imported() -> Any:
    # With a process group, DeepSpeed's import would use it before it is set up.
    deepspeed: Any = importlib.import_module("deepspeed")
    # DeepSpeed would ask the compiler which extensions are compatible, and build the one for
    # shared-memory collectives, which takes a minute. None of them is needed.
    deepspeed.ops.__compatible_ops__ = {}
    for handler in logging.getLogger("DeepSpeed").handlers:
        if type(handler) is logging.StreamHandler:  # DeepSpeed's own handler
            handler.setStream(sys.stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    return deepspeed


def rejected(config: dict[str, Any], accelerator: str) -> list[str]:
    """One line for each error that DeepSpeed itself finds in a configuration."""
    where, before = "the DeepSpeed configuration", os.environ.get(_ACCELERATOR)
    os.environ[_ACCELERATOR] = accelerator
    deepspeed = _imported()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            deepspeed.DeepSpeedConfig(config)
    except (deepspeed.DeepSpeedConfigError, ValueError, TypeError, AssertionError) as error:
        if (errors := getattr(error, "errors", None)) is None:  # not a pydantic error
            return [f"{where}: {' '.join(str(error).split())}"]
        return [f"{'.'.join(map(str, item['loc']))} in {where}: {item['msg']}" for item in errors()]
    finally:  # a check must not change the environment
        del os.environ[_ACCELERATOR]
        if before is not None:
            os.environ[_ACCELERATOR] = before
    return []


@contextlib.contextmanager
def not_broadcasting(scalars: Iterable[nn.Parameter]) -> Iterator[None]:
    """Prevent DeepSpeed from broadcasting these parameters, which are already equal.

    It broadcasts a parameter's bytes, for which torch has no view without dimensions.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    send = Init._zero_init_param

    def divide(init: Any, parameter: nn.Parameter) -> None:
        if parameter.dim() > 0:
            send(init, parameter)
        else:
            init._convert_to_deepspeed_param(parameter)
            vars(parameter)["partition"]()

    for scalar in scalars:
        vars(scalar)["ds_optim_param"] = True  # marks it as rank-local for the engine
    Init._zero_init_param = divide
    try:
        yield
    finally:
        Init._zero_init_param = send


def adopt_process_group(timeout: timedelta) -> None:
    """Make DeepSpeed use the trainer's process group, and not torch's timeout in its own groups."""
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.utils import groups

    groups._WORLD_GROUP = dist.group.WORLD
    TorchBackend.new_group = lambda _, ranks: dist.new_group(ranks, timeout=timeout)


def clean(module: nn.Module, untouched: Mapping[str, set[str]]) -> None:
    """Remove DeepSpeed's attributes from a module, including references to its process group."""
    for name, parameter in module.named_parameters():
        parameter.grad = None
        for attribute in vars(parameter).keys() - untouched[name]:
            delattr(parameter, attribute)
    for layer in module.modules():
        for attribute in _OF_STAGE_3 & vars(layer).keys():
            delattr(layer, attribute)
    from deepspeed.runtime.zero.partition_parameters import (
        InsertPostInitMethodToModuleSubClasses as Overrides,
    )

    if hasattr(Overrides, "linear_bk"):  # stage 3 has replaced torch's function
        nn.functional.linear = Overrides.linear_bk


def forget_process_group() -> None:
    """Drop DeepSpeed's reference to the process group, after it is destroyed."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None


def is_gathered(module: Any) -> bool:
    """Whether a call of a module gathers its own parameters; small ones then stay whole."""
    return any(
        not parameter.ds_persist or parameter.ds_status.name != "AVAILABLE"
        for parameter in module.parameters(recurse=False)
    )


def note_uses(module: nn.Module, note: Callable[[str], object]) -> None:
    """Call ``note`` before stage 3 gathers a parameter that a step uses outside of its module."""
    note = torch.compiler.disable(note)

    def noted(name: str, gather: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        note(f"uses {name}")
        return gather(*arguments, **options)

    for name, parameter in module.named_parameters():
        holder: Any = parameter  # DeepSpeed's methods are its attributes
        holder.all_gather = partial(noted, name, holder.all_gather)


def reduce_in_order(
    zero: Any, parameters: Sequence[Tensor], noted: Callable[[Tensor], object]
) -> None:
    """Have ZeRO reduce gradients in the same order on all ranks, whose buckets then agree.

    ``noted`` is called with each parameter whose gradient a backward has computed.
    """
    reduce = zero.reduce_ready_partitions_and_remove_grads
    end = zero.independent_gradient_partition_epilogue
    order = FixedOrder(len(parameters))
    places = {id(parameter): index for index, parameter in enumerate(parameters)}

    def note(parameter: Tensor, *group: int) -> None:
        noted(parameter)
        order.note(places[id(parameter)], partial(reduce, parameter, *group))

    def finish() -> None:
        order.finish()
        end()

    zero.reduce_ready_partitions_and_remove_grads = note
    zero.independent_gradient_partition_epilogue = finish


_ONE_USE = (
    "a backward may reach a parameter once (checkpoints with use_reentrant=False), and under stage "
    "3 only by the forward of its own module; or use strategy='fsdp'"
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise UserError if the engine meets a step that it cannot compute, as without a gradient."""
    try:
        yield
    except IndexError as error:  # the bucket of gradients to reduce is empty
        if traceback.extract_tb(error.__traceback__)[-1].name != "reduce_ipg_grads":
            raise
        raise UserError(UNREACHED) from error
    except (AssertionError, AttributeError, RuntimeError) as error:
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        is_engine = not isinstance(error, RuntimeError) and "deepspeed" in Path(file).parts
        if not is_engine and "returned an invalid gradient" not in str(error):
            raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"DeepSpeed cannot compute this step ({reason}); {_ONE_USE}") from error
