"""Which network NCCL will use between nodes, as far as files say it before NCCL connects."""

import os
from ctypes.util import find_library
from pathlib import Path

# Set by users who have chosen a network, or sockets.
_CHOICES = ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE")
# InfiniBand and RoCE. A port of AWS's EFA has another link layer, for which NCCL needs a plugin.
_LINK_LAYERS = ("InfiniBand", "Ethernet")


def sockets_note(devices: Path = Path("/sys/class/infiniband")) -> str | None:
    """One line if NCCL will use TCP sockets between nodes, and why; ``None`` otherwise."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if any(map(os.environ.get, _CHOICES)) or any(map(_has_plugin, folders)):
        return None
    if find_library("nccl-net") or find_library("nccl-net-ofi"):
        return None
    why = "libibverbs is not installed"
    if not any(map(_is_usable, devices.glob("*/ports/*"))):
        why = f"no active port of InfiniBand or RoCE in {devices}, no plugin (libnccl-net.so)"
    elif find_library("ibverbs"):
        return None
    return f"NCCL will use TCP sockets between nodes, which are slow: {why}"


def _has_plugin(folder: str) -> bool:
    return any(Path(folder).glob("libnccl-net*.so*"))


def _is_usable(port: Path) -> bool:
    try:
        layer, state = ((port / name).read_text().strip() for name in ("link_layer", "state"))
    except OSError:
        return True  # it cannot be told
    return layer in _LINK_LAYERS and state.endswith("ACTIVE")
