"""DeepSpeed's configuration, the user's or ours, and its conflicts with the trainer's arguments.

And the memory of a rank under it, read from DeepSpeed's ``stage_1_and_2.py`` and ``stage3.py``.

Source: https://www.deepspeed.ai/docs/config-json/
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigurationError, nearest, refuse
from ...launch import files
from ...options import Options
from ..memory import Memory, Sizes, divided, memory
from . import VARIABLES

ONE_BIT_ADAM = "onebitadam"
AUTO = "auto"  # filled in by other trainers
# The last one is the older spelling.
_PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed", "bfloat16": "bf16-mixed"}
# What the trainer does with a precision; the other settings must be off.
_DONE = {"check_grad_overflow": True, "hysteresis": 1}
_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "NAdam", "OneBitAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
)
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# In elements: about a bucket of ddp, and DeepSpeed's default.
_SMALL_BUCKET, _SMALL_GATHER, _LARGE_BUCKET = 4_000_000, 5_000_000, 500_000_000
_FLOAT32 = 4
_MOST_BYTES = 2**20  # of a file
_PROCESS = 45 * 2**20  # of a process on CPUs in a step of any model, measured: the engine's own
_LIVE, _PREFETCHED = 10**9, 5 * 10**7  # of stage 3 by default, in elements
_NOT_TAKEN = {  # settings that split or reduce batches and gradients differently from the trainer
    **dict.fromkeys(
        ("tensor_parallel", "sequence_parallel_size", "data_parallel_size", "expert_parallel"),
        "the trainer splits batches over all processes",
    ),
    "data_efficiency": "the trainer chooses the samples",
    "torch_autocast": "forward passes use autocast by the trainer's precision",
    "hybrid_engine": "it is for generation between training steps",
    "managed_gradient_accumulation": "the trainer determines where a step ends",
    "gradient_allreduce_op": "the trainer expects averaged gradients",
    "train_micro_batch_size_per_gpu": "a micro-batch is what the loader gives, or a part of "
    "global_batch_size",
}


def read(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """Read a dict or a JSON file, given or named by a variable; ``None`` if there is none."""
    name = "strategy_options.config"
    if config is None:
        if (variable := next((key for key in VARIABLES if os.environ.get(key)), None)) is None:
            return None
        config, name = os.environ[variable], variable
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    name += f"={str(config)!r}"
    try:
        content = files.read_json(Path(config), _MOST_BYTES)
    except OSError as error:
        raise ConfigurationError(f"{name}: {error.strerror}; give DeepSpeed's JSON file") from None
    except ValueError as error:
        raise ConfigurationError(f"{name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{name} holds a {type(content).__name__}; give a JSON object")
    return content


def defaults(
    stage: int,
    offload_optimizer: bool,
    offload_parameters: bool,
    reduce_bucket_size: int | None,
    allgather_bucket_size: int | None,
) -> dict[str, Any]:
    """The configuration of a strategy's options; :func:`sized` sets sizes that are ``None``."""
    lines = []
    if offload_parameters and stage != 3:
        lines.append(f"offload_parameters: stage {stage} does not shard them; use 3")
    if offload_optimizer and stage == 0:
        lines.append("offload_optimizer: stage 0 shards nothing; use 1, 2 or 3")
    refuse([f"strategy_options.{line}" for line in lines])
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": reduce_bucket_size,
        "allgather_bucket_size": allgather_bucket_size,
        "offload_optimizer": {"device": "cpu"} if offload_optimizer else None,
        "offload_param": {"device": "cpu"} if offload_parameters else None,
    }
    return {"zero_optimization": {name: value for name, value in zero.items() if value is not None}}


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a configuration; empty if it does not exist."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage; 0 without ZeRO."""
    if config.get("zero_optimization") is True:  # DeepSpeed's older spelling
        return 1
    value = section(config, "zero_optimization").get("stage", 0)
    return value if isinstance(value, int) else 0


def kind(config: Mapping[str, Any], name: str) -> str | None:
    """The type of the ``optimizer`` or ``scheduler``; ``None`` if there is none."""
    value = section(config, name).get("type")
    return value if isinstance(value, str) else None


def is_one_bit_adam(config: Mapping[str, Any]) -> bool:
    return (kind(config, "optimizer") or "").lower() == ONE_BIT_ADAM


def contradictions(config: Mapping[str, Any], options: Options) -> list[str]:
    """One line for each setting of the user's configuration that conflicts with the trainer."""
    where = "the DeepSpeed configuration"
    lines = [
        f"{name} in {where}: {reason}; leave it out"
        for name, reason in _NOT_TAKEN.items()
        if config.get(name) not in (None, {}, 1, True, "mean", AUTO)
        and section(config, name).get("enabled") is not False
    ]
    for name, argument, val in (
        ("gradient_clipping", "gradient_clip_val", options.gradient_clip_val),
        ("gradient_accumulation_steps", "accumulate_grad_batches", options.accumulate_grad_batches),
        ("train_batch_size", "global_batch_size", options.global_batch_size),
    ):
        if (value := config.get(name, AUTO)) not in (AUTO, 0 if val is None else val):
            advice = f"leave it out there, or give {argument}={value!r}"
            lines.append(f"{name}={value!r} in {where}, but {argument}={val!r}; {advice}")
    lines += _contradictions_of_precision(config, str(options.precision))
    for name, known in (
        ("optimizer", _OPTIMIZERS),
        ("scheduler", (*_SCHEDULERS, *vars(torch.optim.lr_scheduler))),
    ):
        named = kind(config, name)
        if name in config and named is None:
            lines.append(f"{name} in {where}: give an object with 'type' and 'params'")
        elif named and named.lower() not in map(str.lower, known):
            lines.append(f"{name} {named!r} in {where} is not one of those{nearest(named, known)}")
    lines += [
        f"{name} to {device!r} in {where}: checkpoints do not support it; use 'cpu'"
        for name in ("offload_optimizer", "offload_param")
        for device in [section(section(config, "zero_optimization"), name).get("device", "cpu")]
        if device not in ("cpu", "none")
    ]
    of_one_bit = {
        f" with ZeRO stage {stage(config)}: it compresses gradients, which ZeRO has already "
        "averaged and sharded; set zero_optimization.stage to 0, or use Adam": stage(config) > 0,
        ": after its warm-up gradients are not averaged, so they cannot be clipped; leave "
        "gradient_clip_val out": options.gradient_clip_val is not None,
    }
    if is_one_bit_adam(config):
        lines += [f"OneBitAdam in {where}{line}" for line, is_so in of_one_bit.items() if is_so]
    return lines


def _contradictions_of_precision(config: Mapping[str, Any], ours: str) -> list[str]:
    where, lines = "the DeepSpeed configuration", []
    for name, precision in _PRECISIONS.items():
        extra = {key: item for key, item in section(config, name).items() if item != AUTO}
        if (enabled := extra.pop("enabled", None)) not in (None, ours == precision):
            problem = f"{name}.enabled={enabled!r} in {where}, but precision={ours!r}"
            fitting = precision if enabled else "32-true"
            lines.append(f"{problem}; leave it out there, or give precision={fitting!r}")
        other = [
            f"{name}.{key}={item!r}" for key, item in extra.items() if item != _DONE.get(key, False)
        ]
        if other and ours == precision:
            reason = "the trainer scales gradients by itself; leave it out"
            lines.append(f"{', '.join(other)} in {where}: {reason}")
    return lines


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the configuration: required settings, and those that the trainer controls."""
    complete: dict[str, Any] = {
        key: value
        for key, value in config.items()
        if value != AUTO and key not in _PRECISIONS and key != "train_batch_size"
    }
    # Its timer synchronizes with the device twice per step.
    complete.setdefault("timers", {"throughput": {"enabled": False}})
    return complete | {
        "train_micro_batch_size_per_gpu": 1,  # used only for DeepSpeed's own throughput numbers
        # The trainer determines the last micro-batch of a step, and weights the losses.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the default is 1.0; the trainer sets the value at each step
        # Unsupported optimizers were already reported, with the reason.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def sized(config: Mapping[str, Any], device_type: str, elements: int) -> dict[str, Any]:
    """Set the buffer sizes that were not given; none is larger than the model.

    On CPUs, a bucket is about one of ddp's. On GPUs, DeepSpeed's defaults are used, but at least
    four buckets, so that communication overlaps with backward. ``elements``: of all parameters.
    """
    options, on_cpu = section(config, "zero_optimization"), device_type == "cpu"
    quarter = max(_SMALL_BUCKET, elements // 4)
    zero: dict[str, Any] = {
        "overlap_comm": not on_cpu,
        "reduce_bucket_size": _SMALL_BUCKET if on_cpu else min(_LARGE_BUCKET, quarter),
        "allgather_bucket_size": _SMALL_GATHER if on_cpu else _LARGE_BUCKET,
        **options,
    }
    if on_cpu or "allgather_bucket_size" in options:
        gathered = zero["allgather_bucket_size"]
        zero["stage3_prefetch_bucket_size"] = gathered
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 2 * gathered
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        zero[name] = min(zero[name] + zero[name] % 2, elements + elements % 2)
    return {**config, "zero_optimization": zero}


def zero_memory(sizes: Sizes, stage: int, zero: Mapping[str, Any]) -> Memory:
    """The memory of a rank, with the section ``zero_optimization`` of its configuration."""
    # A rank steps one flat copy, in float32, of its part of the parameters.
    if stage == 0:
        return memory(sizes, work=sizes.gradients + sizes.activations, mark="unverified")
    share = 1 / sizes.ranks
    mine = divided(
        sizes,
        parameters=share if stage == 3 else 1.0,
        gradients=1.0 if stage == 1 else share,
        optimizer=share,
    )
    mine = replace(mine, optimizer=mine.optimizer + round(_FLOAT32 * sizes.elements * share))
    flat = round(sizes.gradients * share)
    together = sizes.largest if sizes.is_on_host else sizes.gradients
    step = flat + round(sizes.step * share * sizes.gradients / max(together, 1))
    bucket = _FLOAT32 * min(int(zero.get("reduce_bucket_size", 5 * 10**8)), sizes.elements)
    if stage != 2:
        bucket = max(bucket, sizes.largest)  # reduced alone, in a copy
    if stage == 3:
        live = int(zero.get("stage3_max_live_parameters", _LIVE))
        ahead = int(zero.get("stage3_prefetch_bucket_size", _PREFETCHED))
        gathered = min(_FLOAT32 * (live + ahead), sizes.parameters)
        buckets = flat + bucket  # the partitions of gradients and the bucket stay
        work = sizes.work(0.0) + gathered + sizes.largest
    else:
        # Flattened gradients are stepped; gloo gathers all parameters in a copy.
        gathered = sizes.parameters if sizes.is_on_host and sizes.ranks > 1 else 0
        step, buckets = max(step, 2 * flat, gathered), 0
        bucket *= 1 + bool(zero.get("overlap_comm", False))
        if mine.gradients == sizes.gradients:
            # Stage 1 reduces them after backward, or while it runs if communication overlaps.
            work = max(sizes.work(), sizes.gradients + bucket)
        else:
            # A gradient of its own part is copied from the bucket; others are freed.
            work = sizes.work(share) + bucket + sizes.largest
    need = memory(mine, work=work, step=step, buckets=buckets, gathered=gathered, mark="unverified")
    if sizes.is_on_host:  # where the host is the device, nothing is offloaded
        return replace(need, peak=need.peak + _PROCESS, mark="derived")
    return _offloaded(need, mine, sizes, zero)


def _offloaded(need: Memory, mine: Sizes, sizes: Sizes, zero: Mapping[str, Any]) -> Memory:
    steps, holds = (
        (zero.get(name) or {}).get("device", "none") != "none"
        for name in ("offload_optimizer", "offload_param")
    )
    if not (steps or holds):
        return need
    host = 0
    if steps:
        host += mine.optimizer + round(sizes.gradients / sizes.ranks)
        # What is left on the device for a step is the copy of the new parameters.
        need = replace(need, optimizer=0, peak=need.peak - mine.optimizer)
    if holds:
        host += mine.parameters
        need = replace(need, parameters=0, peak=need.peak - mine.parameters)
    return replace(need, host=host * sizes.devices, mark="unverified")
