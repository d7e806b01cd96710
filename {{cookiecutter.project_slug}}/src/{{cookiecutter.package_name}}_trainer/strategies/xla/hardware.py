"""The TPUs of this machine, and whether the installed torch_xla fits torch."""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGE = "torch_xla"
INSTALL = "make xla (into an environment of its own, .venv-xla)"
DEVICE = "PJRT_DEVICE"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"


def count_chips() -> int | None:
    """Number of TPU chips of this machine; ``None`` without a torch_xla that fits torch."""
    if importlib.util.find_spec(PACKAGE) is None or mismatch() is not None:
        return None
    if os.environ.get(DEVICE, "TPU").upper() != "TPU":
        return 0
    vendors = _PCI_DEVICES.glob("*/vendor")  # of chips, and of network cards of Google's cloud
    if not any(each.read_text("utf-8").strip() == _GOOGLE for each in vendors):
        return 0  # importing torch_xla takes seconds, sets PJRT_DEVICE, and prints a warning
    from torch_xla._internal import tpu

    # It counts them on the PCI bus, and opens none: a chip belongs to one process at a time.
    found: int = tpu.num_available_chips()
    return found


def mismatch() -> str | None:
    """Why the installed torch_xla cannot be imported with this torch; ``None`` if it can."""
    try:
        built_for = version(PACKAGE)
    except PackageNotFoundError:
        return None
    if built_for.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    return (
        f"torch_xla {built_for} works only with torch of the same version, and this is torch "
        f"{torch.__version__}: {INSTALL}"
    )
