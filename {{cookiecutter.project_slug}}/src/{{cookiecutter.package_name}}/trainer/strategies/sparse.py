"""Sparse gradients: those of ``nn.Embedding(sparse=True)`` and ``nn.EmbeddingBag(sparse=True)``.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html
"""

import torch
from torch import Tensor, nn

from .. import distributed


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters whose gradients are sparse, by name: of embeddings made with ``sparse=True``."""
    found = {}
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        is_embedding = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if last == "weight" and is_embedding and owner.sparse:
            found[name] = parameter
    return found


def problems_of(module: nn.Module, reason: str) -> list[str]:
    """One line for each sparse gradient of a module, where a strategy cannot take them.

    Args:
        module: the user's.
        reason: why it cannot.
    """
    return [
        f"{name} has sparse gradients (sparse=True): {reason}; make the embedding with "
        "sparse=False, or use strategy='ddp'"
        for name, parameter in sparse_parameters(module).items()
        if parameter.requires_grad
    ]


def average(gradient: Tensor) -> Tensor:
    """The mean of all processes' sparse gradients of a parameter; rows may differ between them."""
    gradient = gradient.coalesce()
    indices = distributed.all_gather(gradient.indices().T.contiguous())
    values = distributed.all_gather(gradient.values())
    mean = torch.sparse_coo_tensor(
        torch.cat(indices).T, torch.cat(values) / distributed.world_size(), gradient.shape
    )
    return mean.coalesce()


def zeros(parameter: Tensor) -> Tensor:
    """A sparse gradient without rows."""
    indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(0, *parameter.shape[1:], requires_grad=False)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)
