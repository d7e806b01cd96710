"""``auto_select_gpus``: select idle GPUs on a shared machine."""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ConfigurationError

_MIG_HINT = (
    "of which CUDA shows a process only one; leave auto_select_gpus out, and set the instance in "
    "CUDA_VISIBLE_DEVICES"
)
ComputeMode = Literal["default", "exclusive", "prohibited"]


@dataclass(frozen=True)
class GPU:
    """A GPU, with its index in torch and the number of compute processes running on it."""

    index: int
    name: str
    compute_mode: ComputeMode
    processes: int
    free_bytes: int


def choose(gpus: Sequence[GPU], count: int) -> list[int]:
    """Select GPUs for training: idle ones first, then by free memory.

    GPUs in exclusive mode that already run a process, and GPUs in prohibited mode, are skipped.

    Args:
        gpus: All available GPUs.
        count: Number of GPUs to select, at least 1.

    Returns:
        The selected indices, best first.

    Raises:
        ConfigurationError: Too few GPUs can be used; the message gives the reason for each other.
    """
    usable = [gpu for gpu in gpus if _obstacle(gpu) is None]
    if len(usable) < count:
        obstacles = [
            f"GPU {gpu.index} ({gpu.name}) {obstacle}"
            for gpu in gpus
            if (obstacle := _obstacle(gpu)) is not None
        ]
        raise ConfigurationError(
            f"auto_select_gpus: {count} wanted, {len(usable)} of {len(gpus)} can be used"
            + "".join(f"; {obstacle}" for obstacle in obstacles)
            + "; ask for fewer"
            + (" or wait" if obstacles else "")
        )
    usable.sort(key=lambda gpu: (gpu.processes > 0, -gpu.free_bytes, gpu.index))
    return [gpu.index for gpu in usable[:count]]


def _obstacle(gpu: GPU) -> str | None:
    if gpu.compute_mode == "prohibited":
        return "is in prohibited mode"
    if gpu.compute_mode == "exclusive" and gpu.processes > 0:
        return "is in exclusive mode and occupied"
    return None


def read_gpus() -> list[GPU]:
    """Read the GPUs visible to torch through NVML, the driver's library.

    CUDA is neither initialized nor queried. In a container, the driver may hide the processes of
    other containers; their memory still counts as used.

    Raises:
        ConfigurationError: NVML's package is missing, NVML fails, or its GPUs cannot be mapped to
            torch's.

    Source: https://docs.nvidia.com/deploy/nvml-api/
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise ConfigurationError(
            "auto_select_gpus needs a package that is not installed: pip install nvidia-ml-py"
        ) from None
    try:
        nvml.nvmlInit()
        try:
            return _read(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise ConfigurationError(
            f"auto_select_gpus: the driver's library fails ({error}); select GPUs with devices=[…]"
        ) from None


def _read(nvml: Any) -> list[GPU]:
    modes: dict[int, ComputeMode] = {
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    positions = visible(os.environ, names, uuids)
    for position in positions:
        if _is_mig_enabled(nvml, handles[position]):
            raise ConfigurationError(
                f"auto_select_gpus: GPU {uuids[position]} is partitioned (MIG), {_MIG_HINT}"
            )
    return [
        GPU(
            index=index,
            name=names[position],
            compute_mode=modes.get(nvml.nvmlDeviceGetComputeMode(handles[position]), "default"),
            processes=len(nvml.nvmlDeviceGetComputeRunningProcesses(handles[position])),
            free_bytes=nvml.nvmlDeviceGetMemoryInfo(handles[position]).free,
        )
        for index, position in enumerate(positions)
    ]


def _is_mig_enabled(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # the model does not support MIG
        return False
    return bool(current)


def visible(
    environment: Mapping[str, str], names: Sequence[str], uuids: Sequence[str]
) -> list[int]:
    """Map torch's device indices 0, 1, … to NVML's indices.

    NVML numbers all GPUs by PCI bus. CUDA numbers those in ``CUDA_VISIBLE_DEVICES``, in the order
    given there: UUIDs or prefixes of them, or indices. Indices count by PCI bus if
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, else fastest first, which is the same among equal GPUs. As in
    CUDA, entries after one that names no GPU are ignored, and a GPU named twice leaves none.

    Args:
        environment: The environment variables.
        names, uuids: Of all GPUs, in NVML's order.

    Raises:
        ConfigurationError: GPUs of several models are numbered fastest first, or MIG instances are
            named.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is not None and text.startswith("MIG-"):
        raise ConfigurationError(
            f"auto_select_gpus: CUDA_VISIBLE_DEVICES names MIG instances, {_MIG_HINT}"
        )
    is_by_uuid = text is not None and text.startswith("GPU-")
    is_by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not is_by_uuid and not is_by_bus and len(set(names)) > 1:
        raise ConfigurationError(
            f"auto_select_gpus: of different GPUs ({', '.join(sorted(set(names)))}) CUDA counts "
            "the fastest first, and which one that is is unknown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if text is None:
        return list(range(len(uuids)))
    positions: list[int] = []
    for entry in text.split(","):
        position = _by_uuid(entry, uuids) if is_by_uuid else _by_index(entry, len(uuids))
        if position is None:
            break
        if position in positions:
            return []
        positions.append(position)
    return positions


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    found = [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return found[0] if entry.startswith("GPU-") and len(found) == 1 else None


def _by_index(entry: str, count: int) -> int | None:
    try:
        index = int(entry)
    except ValueError:
        return None
    return index if index in range(count) else None
