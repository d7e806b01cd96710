"""Sparse gradients: those of ``nn.Embedding(sparse=True)`` and ``nn.EmbeddingBag(sparse=True)``.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...launch import collectives


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with sparse gradients, by name: of embeddings created with ``sparse=True``."""
    sparse = {}
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        if last == "weight" and isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
            sparse[name] = parameter
    return sparse


def problems_of(module: nn.Module, reason: str) -> list[str]:
    """One line for each sparse gradient of a module, which a strategy refuses for a reason."""
    return [
        f"{name} has sparse gradients (sparse=True): {reason}; make the embedding with "
        "sparse=False, or use strategy='ddp'"
        for name, parameter in sparse_parameters(module).items()
        if parameter.requires_grad
    ]


def average(gradient: Tensor) -> Tensor:
    """Average a sparse gradient over all processes; their rows may differ."""
    gradient = gradient.coalesce()
    indices = collectives.all_gather(gradient.indices().T.contiguous())
    mean = torch.cat(collectives.all_gather(gradient.values())) / collectives.world_size()
    return _made(torch.cat(indices).T, mean, gradient.shape).coalesce()


def zeros(parameter: Tensor) -> Tensor:
    """A sparse gradient without rows."""
    indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(0, *parameter.shape[1:], requires_grad=False)
    return _made(indices, values, parameter.shape)


def _made(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    # torch warns unless it is told whether to check invariants.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def split_sparse(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert gradients for a checkpoint: a sparse one becomes two dense tensors."""
    tensors: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            # Not coalesced: later gradients would be added to sums, in another order of rounding.
            tensors |= {f"{name}/rows": gradient._indices(), f"{name}/values": gradient._values()}
        else:
            tensors[name] = gradient
    return tensors


def join_sparse(saved: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Undo :func:`split_sparse`, for the parameters of a module."""
    tensors = {name: tensor for name, tensor in saved.items() if "/" not in name}
    for name, parameter in module.named_parameters():
        if f"{name}/rows" in saved:
            rows, values = saved[f"{name}/rows"], saved[f"{name}/values"]
            tensors[name] = _made(rows, values, parameter.shape).to(parameter.device)
    return tensors
