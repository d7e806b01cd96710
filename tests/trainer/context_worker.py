"""One rank of a context group: attention, gathers and means of slices against the whole.

``python -m context_worker compare RANK PROCESSES FOLDER`` prints, for each case, the largest
difference of an output or an averaged gradient from torch's own attention in one process.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from my_project_trainer.data import sequence
from my_project_trainer.errors import UserError
from my_project_trainer.launch.rendezvous import stay_on_loopback
from my_project_trainer.strategies.model_parallel.mesh import context as context_module
from my_project_trainer.strategies.model_parallel.mesh.context import Context
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

LENGTHS = (32, 33, 35, 3)
HEADS, WIDTH = 4, 6


def masks(length: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of mask, as the arguments of attention to a whole sequence."""
    draw = torch.Generator().manual_seed(length)
    is_seen = torch.rand(length, length, generator=draw) < 0.5
    is_seen.fill_diagonal_(True)
    is_token = torch.rand(2, 1, 1, length, generator=draw) < 0.7
    is_token[..., 0] = True
    yield "none", {}
    yield "causal", {"is_causal": True}
    yield "boolean", {"attn_mask": is_seen}
    yield "additive", {"attn_mask": torch.randn(HEADS, length, length, generator=draw).double()}
    yield "of keys", {"attn_mask": is_token}
    yield "causal, scaled, grouped", {"is_causal": True, "scale": 0.3, "enable_gqa": True}


def attention(context: Context, length: int, how: dict[str, Any]) -> float:
    """The largest difference of an output, or of a gradient averaged over the group."""
    draw = torch.Generator().manual_seed(0)
    heads = HEADS // 2 if "enable_gqa" in how else HEADS
    shapes = [(2, HEADS, length, WIDTH), (2, heads, length, WIDTH), (2, heads, length, WIDTH + 1)]
    whole = [torch.randn(shape, generator=draw).double().requires_grad_() for shape in shapes]
    weights = torch.randn(2, HEADS, length, WIDTH + 1, generator=draw).double()
    expected = scaled_dot_product_attention(*whole, **how)
    gradients = torch.autograd.grad((expected * weights).mean(), whole)

    with context.step("training"):
        parts = [sequence.split(each, -2) for each in whole]
        mask = how.get("attn_mask")
        if mask is not None and mask.shape[-2] > 1:
            how = {**how, "attn_mask": sequence.split(mask, -2)}
        output = sequence.attention(*parts, **how)
        sequence.mean(output * sequence.split(weights, -2)).backward()
        joined = sequence.gather(output, -2)
    differences = [(joined - expected).detach()]
    for each, gradient in zip(whole, gradients, strict=True):
        assert each.grad is not None
        dist.all_reduce(each.grad)
        differences.append(each.grad / dist.get_world_size() - gradient)
    return max(float(each.abs().max()) for each in differences)


def losses(context: Context, length: int) -> float:
    """The same for a mean over targets of which whole slices are ignored, and one of the whole."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, length, 5, generator=draw).double().requires_grad_()
    targets = torch.randint(5, (2, length), generator=draw)
    targets[:, : length // 2] = -100  # all of the first slices
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten())
    pooled = logits.exp().mean(1).log().square().mean()
    (gradient,) = torch.autograd.grad(expected + pooled, logits)

    with context.step("training"):
        own, own_targets = sequence.split(logits, 1), sequence.split(targets, 1)
        each = cross_entropy(own.flatten(0, 1), own_targets.flatten(), reduction="none")
        loss = sequence.mean(each, (own_targets != -100).sum())
        loss = loss + sequence.gather(own.exp(), 1).mean(1).log().square().mean()
        loss.backward()
    assert logits.grad is not None
    dist.all_reduce(logits.grad)
    difference = (logits.grad / dist.get_world_size() - gradient).abs().max()
    return max(float(difference), float((loss - expected - pooled).abs()))


def work(context: Context, length: int) -> int:
    """How many scores this rank computes in causal attention."""
    counted = 0

    def count(query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Tensor:
        nonlocal counted
        counted += query.shape[-2] * key.shape[-2]
        return scaled_dot_product_attention(query, key, *arguments, **named)

    with (
        context.step("training"),
        mock.patch.object(context_module, "scaled_dot_product_attention", count),
    ):
        parts = [sequence.split(torch.ones(1, 1, length, 2), -2) for _ in range(3)]
        sequence.attention(*parts, is_causal=True)
    return counted


def refusals(context: Context) -> dict[str, str]:
    """What a module is told that does not split its sequences, or splits them ambiguously."""
    found = {}
    for name, act in {
        "unused": lambda: None,
        "unknown": lambda: context.gather(torch.zeros(7), 0),
        "ambiguous": lambda: [context.split(torch.zeros(length), 0) for length in (8, 9, 10)],
        "two masks": lambda: sequence.attention(
            *(context.split(torch.zeros(1, 8, 2), 1) for _ in range(3)),
            attn_mask=torch.ones(4, 8, dtype=torch.bool),
            is_causal=True,
        ),
    }.items():
        try:
            with context.step("training"):
                act()
        except (UserError, ValueError) as error:
            found[name] = str(error)
    return found


def compare(rank: int, processes: int, folder: Path) -> None:
    """Print the differences of all cases, and the refusals."""
    assert dist.group.WORLD is not None
    context = Context(dist.group.WORLD)
    differences = {
        f"{length}, {name}": attention(context, length, how)
        for length in LENGTHS
        for name, how in masks(length)
    }
    differences |= {f"{length}, loss": losses(context, length) for length in LENGTHS}
    found = {"differences": differences, "refusals": refusals(context)}
    print(json.dumps({**found, "work": [work(context, length) for length in LENGTHS]}))


def main(subject: str, rank: int, processes: int, folder: Path) -> None:
    """Join the group and compare in it."""
    stay_on_loopback()
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    {"compare": compare}[subject](rank, processes, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
