"""The local shard of a tensor: all of a plain tensor, one part of a DTensor.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor; checked without importing DTensor, which is slow."""
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def local(value: Tensor) -> Tensor:
    dtensor: Any = value
    return dtensor.to_local() if is_sharded(value) else value


def full(value: Any) -> Any:
    """The full tensor of a DTensor; other values as they are."""
    return value.full_tensor() if is_sharded(value) else value


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors by the mesh of DTensors, and plain ones together, each in their order."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[getattr(tensor, "device_mesh", None)].append(tensor)
    return list(groups.values())


def is_first_copy(value: Tensor) -> bool:
    """Whether no lower rank has a replica of this rank's shard.

    The ranks of a mesh's other dimensions, if it is a part of a larger one, have replicas too.
    """
    dtensor: Any = value
    mesh = dtensor.device_mesh
    root = mesh._get_root_mesh()
    here, of_root = mesh.get_coordinate(), root.get_coordinate()
    placed = zip(here, dtensor.placements, strict=True)
    shared = [coordinate for coordinate, placement in placed if placement.is_replicate()]
    if root is not mesh:
        named = zip(root.mesh_dim_names, of_root, strict=True)
        shared += [coordinate for name, coordinate in named if name not in mesh.mesh_dim_names]
    return not any(shared)


def offsets(value: Tensor) -> list[int]:
    """Offset of this rank's shard in the full tensor, one number per dimension."""
    if not is_sharded(value):
        return [0] * value.ndim
    dtensor: Any = value
    (chunk,) = dtensor.__create_chunk_list__()
    return list(chunk.offsets)
