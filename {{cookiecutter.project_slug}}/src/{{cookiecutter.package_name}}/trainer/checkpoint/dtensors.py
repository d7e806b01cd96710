"""What lies here of a tensor: all of a plain one, one part of a DTensor.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from typing import Any

from torch import Tensor


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor; asked without importing them, which takes a moment."""
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def local(value: Tensor) -> Tensor:
    """What lies in this process."""
    part: Any = value
    return part.to_local() if is_sharded(value) else value


def is_first_copy(value: Tensor) -> bool:
    """Whether no lower rank holds a copy of this rank's shard of a DTensor."""
    whole: Any = value
    coordinates = whole.device_mesh.get_coordinate()
    return coordinates is not None and all(
        coordinate == 0
        for coordinate, placement in zip(coordinates, whole.placements, strict=True)
        if placement.is_replicate()
    )


def offsets(value: Tensor) -> list[int]:
    """Where this rank's part begins in the whole tensor, one number a dimension."""
    if not is_sharded(value):
        return [0] * value.ndim
    whole: Any = value
    (chunk,) = whole.__create_chunk_list__()
    return list(chunk.offsets)
