"""The memory of a rank under ZeRO, read from DeepSpeed's ``stage_1_and_2.py`` and ``stage3.py``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..memory import Memory, Sizes, divided, memory

_FLOAT32 = 4
# Of a process on CPUs in a step of any model, measured: the engine's own.
_PROCESS = 45 * 2**20
# DeepSpeed's defaults of stage 3, in elements.
_LIVE, _PREFETCHED = 10**9, 5 * 10**7


def zero_memory(sizes: Sizes, stage: int, zero: Mapping[str, Any]) -> Memory:
    """The memory of a rank.

    A rank steps one flat copy, in float32, of its part of the parameters.

    Args:
        sizes: Of one process.
        stage: The ZeRO stage.
        zero: The section ``zero_optimization`` of the configuration.
    """
    if stage == 0:
        return memory(sizes, work=sizes.gradients + sizes.activations, mark="unverified")
    part = 1 / sizes.ranks
    own = divided(
        sizes,
        parameters=part if stage == 3 else 1.0,
        gradients=1.0 if stage == 1 else part,
        optimizer=part,
    )
    own = replace(own, optimizer=own.optimizer + round(_FLOAT32 * sizes.elements * part))
    flat = round(sizes.gradients * part)
    together = sizes.largest if sizes.is_on_host else sizes.gradients
    step = flat + round(sizes.step * part * sizes.gradients / max(together, 1))
    bucket = _FLOAT32 * min(int(zero.get("reduce_bucket_size", 5 * 10**8)), sizes.elements)
    if stage != 2:
        bucket = max(bucket, sizes.largest)  # reduced alone, in a copy
    found = (_stage_3 if stage == 3 else _stage_1_and_2)(own, sizes, zero, bucket, flat, step)
    if sizes.is_on_host:  # where the host is the device, nothing is offloaded
        return replace(found, peak=found.peak + _PROCESS, mark="derived")
    return _offloaded(found, own, sizes, zero)


def _stage_1_and_2(
    own: Sizes, sizes: Sizes, zero: Mapping[str, Any], bucket: int, flat: int, step: int
) -> Memory:
    overlaps = bool(zero.get("overlap_comm", False))
    buckets = bucket * (1 + overlaps)
    if own.gradients == sizes.gradients:
        # Stage 1 reduces gradients after backward, or while it runs if communication overlaps.
        work = max(sizes.work(), sizes.gradients + buckets)
    else:
        # A gradient of its own part is copied from the bucket; others are freed.
        work = sizes.work(1 / sizes.ranks) + buckets + sizes.largest
    # A rank's gradients are flattened before its step; gloo gathers all parameters in a copy.
    gathered = sizes.parameters if sizes.is_on_host and sizes.ranks > 1 else 0
    step = max(step, 2 * flat, gathered)
    return memory(own, work=work, step=step, gathered=gathered, mark="unverified")


def _stage_3(
    own: Sizes, sizes: Sizes, zero: Mapping[str, Any], bucket: int, flat: int, step: int
) -> Memory:
    live = int(zero.get("stage3_max_live_parameters", _LIVE))
    ahead = int(zero.get("stage3_prefetch_bucket_size", _PREFETCHED))
    gathered = min(_FLOAT32 * (live + ahead), sizes.parameters)
    # The partitions of gradients and the bucket stay.
    buckets = flat + bucket
    work = sizes.work(0.0) + gathered + sizes.largest
    return memory(own, work=work, step=step, buckets=buckets, gathered=gathered, mark="unverified")


def _offloaded(found: Memory, own: Sizes, sizes: Sizes, zero: Mapping[str, Any]) -> Memory:
    """Move to the host what the configuration offloads."""
    devices = {
        name: (zero.get(name) or {}).get("device", "none") != "none"
        for name in ("offload_optimizer", "offload_param")
    }
    if not any(devices.values()):
        return found
    host = 0
    if devices["offload_optimizer"]:
        flat = round(sizes.gradients / sizes.ranks)
        host += own.optimizer + flat
        # What is left on the device for a step is the copy of the new parameters.
        left = found.peak - own.optimizer
        found = replace(found, optimizer=0, peak=left)
    if devices["offload_param"]:
        host += own.parameters
        found = replace(found, parameters=0, peak=found.peak - own.parameters)
    return replace(found, host=host * sizes.devices, mark="unverified")
