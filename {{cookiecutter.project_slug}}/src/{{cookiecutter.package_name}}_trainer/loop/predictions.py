"""Predictions of any nesting: checked, and sent between ranks without pickle."""

import dataclasses
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..launch import collectives
from ..options.values import plain_number

_CELLS = (str, bool, int, float, type(None))


class Packed(NamedTuple):
    """The prediction for a batch as JSON, and its tensors."""

    batch: int
    tree: Any
    tensors: list[Tensor]


def pack(batch: int, output: Any) -> Packed:
    """Convert what ``predict_step`` returned; refuse objects of other types."""
    packed = Packed(batch, None, [])
    return packed._replace(tree=_tree(output, packed.tensors))


def plain(output: Any) -> Any:
    """The same nesting of tensors and Python's own types, for ``torch.save``."""
    _, tree, tensors = pack(0, output)
    # Without the rest of a tensor of which it is a view: that would be written, too.
    return _unpack(tree, [each.detach().clone() for each in tensors], is_plain=True)


def table(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of batches that are each a dict of columns of one length; empty if one is not."""
    rows: list[dict[str, Any]] = []
    for each in outputs:
        if not (isinstance(each, Mapping) and each and all(isinstance(name, str) for name in each)):
            return []
        columns = [value.tolist() if hasattr(value, "tolist") else value for value in each.values()]
        are_flat = all(
            isinstance(column, list | tuple) and all(isinstance(x, _CELLS) for x in column)
            for column in columns
        )
        is_other = rows and each.keys() != rows[0].keys()
        if is_other or not are_flat or len({*map(len, columns)}) > 1:
            return []
        rows += [dict(zip(each, row, strict=True)) for row in zip(*columns, strict=True)]
    return rows


def gathered(outputs: Sequence[Packed], replica: int) -> list[Any]:
    """The predictions of all ranks in the dataset's order, on every rank."""
    most = collectives.all_reduce(torch.tensor([len(outputs)]), "max")
    found = []
    for index in range(int(most)):  # batch by batch: in memory, the bytes of all are there once
        head, parts = None, [torch.zeros(1, dtype=torch.uint8)]  # never empty
        if index < len(outputs):
            batch, tree, tensors = outputs[index]
            forms = [[str(each.dtype), list(each.shape)] for each in tensors]
            head, parts = [batch, replica, tree, forms], [*map(_bytes, tensors), *parts]
        heads = collectives.gather(head)
        for each, content in zip(heads, collectives.all_gather(torch.cat(parts)), strict=True):
            if each is not None:
                found.append((*each[:2], _unpack(each[2], _tensors(content, each[3]))))
    return [output for *_, output in sorted(found, key=operator.itemgetter(0, 1))]


def _tree(value: Any, tensors: list[Tensor]) -> Any:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    if is_plain and not (value.is_nested or value.is_quantized):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    kind = type(value)
    value = value if isinstance(value, Tensor) else plain_number(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
        tensors.append(torch.tensor(value))
        return {"array": len(tensors) - 1}
    items: list[Any]
    if isinstance(value, Mapping):
        kind = dict if isinstance(value, defaultdict) else kind
        form, items = "dict", [[_tree(each, tensors) for each in pair] for pair in value.items()]
    elif isinstance(value, list | tuple):
        form = "list" if isinstance(value, list) else "tuple"
        items = [_tree(each, tensors) for each in value]
    elif dataclasses.is_dataclass(kind):
        names = (each.name for each in dataclasses.fields(value) if hasattr(value, each.name))
        form, items = "fields", [[name, _tree(getattr(value, name), tensors)] for name in names]
    else:
        what = f"tensor of {value.layout}" if isinstance(value, Tensor) else kind.__qualname__
        raise UserError(
            f"predict_step returned a {what}, which ranks cannot exchange and files cannot hold: "
            "return dense tensors, numbers, text and None, in dicts, lists, tuples or dataclasses"
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    if collectives.world_size() > 1 and _class(name) is not kind:
        raise UserError(
            f"predict_step returned a {kind.__qualname__}, which other ranks cannot find: define "
            "the class at the top of its module"
        )
    return [name, form, items]


def _class(name: str) -> Any:
    """A class of a module that is imported already; ``None`` if it is not there."""
    module, _, path = name.partition(":")
    try:
        return operator.attrgetter(path)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _unpack(tree: Any, tensors: Sequence[Tensor], *, is_plain: bool = False) -> Any:
    def whole(part: Any) -> Any:
        return _unpack(part, tensors, is_plain=is_plain)

    if isinstance(tree, dict):
        ((what, index),) = tree.items()
        return tensors[index].numpy() if what == "array" and not is_plain else tensors[index]
    if not isinstance(tree, list):
        return tree
    name, form, items = tree
    kind = {"list": list, "tuple": tuple}.get(form, dict) if is_plain else _class(name)
    if form == "fields" and not is_plain:
        made = object.__new__(kind)
        for field, each in items:  # it may be frozen
            object.__setattr__(made, field, whole(each))
        return made
    if form in ("dict", "fields"):
        return kind([[whole(key), whole(each)] for key, each in items])
    values = [whole(each) for each in items]
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _bytes(tensor: Tensor) -> Tensor:
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return whole.view(-1).view(torch.uint8)


def _tensors(content: Tensor, forms: Sequence[Any]) -> list[Tensor]:
    found, end = [], 0
    for name, shape in forms:
        dtype = getattr(torch, name.removeprefix("torch."))
        start, end = end, end + math.prod(shape) * dtype.itemsize
        found.append(content[start:end].clone().view(dtype).view(shape))
    return found
