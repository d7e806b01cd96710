"""Import torchvision where its build does not fit torch's."""

import importlib

import torch


def import_torchvision() -> torch.library.Library | None:
    """Import it, if need be without its operators.

    They cannot be loaded where its build for CUDA, which the public index has, is beside torch's
    for the CPU. Training a ResNet or a RetinaNet calls none, but the import needs to know two.

    Returns:
        what must outlive its use.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")
        return operators
    return None
