"""``auto_select_gpus``: which GPUs to train on where others train too."""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ConfigurationError

_NO_CHOICE = (
    "of which CUDA shows a process one alone; leave auto_select_gpus out, and name the part in "
    "CUDA_VISIBLE_DEVICES"
)
ComputeMode = Literal["default", "exclusive", "prohibited"]


@dataclass(frozen=True)
class GPU:
    """A GPU under torch's index, with the number of compute processes that it runs."""

    index: int
    name: str
    compute_mode: ComputeMode
    processes: int
    free_bytes: int


def choose(gpus: Sequence[GPU], count: int) -> list[int]:
    """Indices of the GPUs to train on, the best first: idle ones, then those with most free memory.

    A GPU in exclusive mode that runs a process takes no other, and one in prohibited mode takes
    none: both are passed over.

    Args:
        gpus: all there are.
        count: how many are wanted, at least 1.

    Raises:
        ConfigurationError: fewer can be used; the line says of each other GPU why not.
    """
    usable = [gpu for gpu in gpus if _hindrance(gpu) is None]
    if len(usable) < count:
        hindrances = [
            f"GPU {gpu.index} ({gpu.name}) {hindrance}"
            for gpu in gpus
            if (hindrance := _hindrance(gpu)) is not None
        ]
        raise ConfigurationError(
            f"auto_select_gpus: {count} wanted, {len(usable)} of {len(gpus)} can be used"
            + "".join(f"; {hindrance}" for hindrance in hindrances)
            + "; ask for fewer"
            + (" or wait" if hindrances else "")
        )
    usable.sort(key=lambda gpu: (gpu.processes > 0, -gpu.free_bytes, gpu.index))
    return [gpu.index for gpu in usable[:count]]


def _hindrance(gpu: GPU) -> str | None:
    if gpu.compute_mode == "prohibited":
        return "is in prohibited mode"
    if gpu.compute_mode == "exclusive" and gpu.processes > 0:
        return "is in exclusive mode and occupied"
    return None


def read_gpus() -> list[GPU]:
    """The GPUs that torch sees, as NVML, the driver's library, describes them.

    CUDA stays as it is: neither started nor asked. In a container the driver may hide other
    containers' processes; their memory still counts as taken.

    Raises:
        ConfigurationError: NVML's package is missing, NVML fails, or it cannot be told which of its
            GPUs are torch's.

    Source: https://docs.nvidia.com/deploy/nvml-api/
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise ConfigurationError(
            "auto_select_gpus needs a package that is not here: pip install nvidia-ml-py"
        ) from None
    try:
        nvml.nvmlInit()
        try:
            return _read(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise ConfigurationError(
            f"auto_select_gpus: the driver's library fails ({error}); say which by devices=[…]"
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
        if _is_sharded(nvml, handles[position]):
            raise ConfigurationError(
                f"auto_select_gpus: GPU {uuids[position]} is divided into parts (MIG), {_NO_CHOICE}"
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


def _is_sharded(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a model that cannot be
        return False
    return bool(current)


def visible(
    environment: Mapping[str, str], names: Sequence[str], uuids: Sequence[str]
) -> list[int]:
    """Where NVML counts the GPUs that torch counts 0, 1, ….

    NVML counts all GPUs by PCI bus. CUDA counts those in ``CUDA_VISIBLE_DEVICES`` in the order
    given there: UUIDs, of which a beginning is enough, or indices. Indices count by PCI bus under
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, else the fastest first, which among equal GPUs is the same.
    As in CUDA, what follows an entry that names no GPU is not read, and a GPU named twice leaves
    none.

    Args:
        environment: where these variables stand.
        names, uuids: of all GPUs, in NVML's order.

    Raises:
        ConfigurationError: GPUs of several models are counted the fastest first, or parts of GPUs
            (MIG) are named.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is not None and text.startswith("MIG-"):
        raise ConfigurationError(
            f"auto_select_gpus: CUDA_VISIBLE_DEVICES names parts of GPUs (MIG), {_NO_CHOICE}"
        )
    is_by_uuid = text is not None and text.startswith("GPU-")
    is_by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not is_by_uuid and not is_by_bus and len(set(names)) > 1:
        raise ConfigurationError(
            f"auto_select_gpus: of different GPUs ({', '.join(sorted(set(names)))}) CUDA counts "
            "the fastest first, and nothing tells which that is; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
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
