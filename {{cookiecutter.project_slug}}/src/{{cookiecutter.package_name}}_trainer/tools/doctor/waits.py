"""Where a training step makes the host wait for the device, by source line, found on the CPU.

What a GPU would hold is followed: reading a tensor of the host does not wait.
"""

import contextlib
import inspect
import linecache
import os
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ...cli import imports
from ...launch import files

_aten = torch.ops.aten
# A GPU answers only when it has computed all that was asked of it before. torch marks operators
# whose result, or its shape, depends on values; two more wait on a GPU only.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OTHERS = (_aten.multinomial.default, _aten._linalg_check_errors.default)
_INDEXES = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
# What no operator shows, because the CPU reads it directly.
_READS = ("numpy", "__array__", "tolist", "__repr__", "__format__")
_TRAINER = f"{Path(__file__).resolve().parents[2]}{os.sep}"
LIBRARIES = (_TRAINER, "<", f"{Path(torch.__file__).parent}{os.sep}", *imports.INSTALLED)
"""With what the names of files begin that are not the user's."""


class Waits(TorchDispatchMode):
    """Notes the lines of source at which the host would wait.

    ``seen``: by line, the numbers of the batches in which it does. ``owner``: file of the user's
    model, whose folder counts as source even if it is installed.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, set[int]] = defaultdict(set)
        self.batch, self.is_paused = 0, False
        self._owner = f"{Path(owner).parent}{os.sep}"
        self.storages: Any = WeakIdKeyDictionary()  # which views share

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        calls: Any = dict.fromkeys(("synchronize", "empty_cache"), lambda *_, **__: self.note())
        with mock.patch.multiple(torch.cuda, **calls), self, _Functions(self):
            yield

    def mark(self, value: Any) -> None:
        """Note that the tensors in a value would be on the device."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self.storages[leaf.untyped_storage()] = True

    def has(self, value: Any) -> bool:
        """Whether a value is a tensor that would be on the device."""
        is_strided = isinstance(value, Tensor) and value.layout is torch.strided
        return is_strided and value.untyped_storage() in self.storages

    def note(self) -> None:
        """Note that the user's line that is running waits; not what the trainer does itself."""
        if self.is_paused:
            return
        for frame, line in traceback.walk_stack(inspect.currentframe()):
            file = frame.f_code.co_filename
            if file.startswith(self._owner) or not file.startswith(LIBRARIES):
                text = linecache.getline(file, line).strip()
                self.seen[f"{files.shown(Path(file), Path.cwd())}:{line}: {text}"].add(self.batch)
                return
            if file.startswith(_TRAINER) and file != __file__:
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_copy = kwargs or {}, func is _aten.copy_.default
        is_on_device = any(map(self.has, tree_leaves((args, kwargs))))
        if is_copy:  # which changes the device of no tensor
            is_moved = self.has(args[0]) != self.has(args[1])
            waits = is_moved and args[1].ndim and not (*args, False)[2]
        elif func in _INDEXES:
            has_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
            waits = has_mask and not (len(args) > 2 and args[2].numel() == 1)  # which only fills
        elif func is _aten.histc.default:  # without a range, it asks for the least and the most
            waits = len({*(*args, 0, 0)[2:4]}) == 1
        else:
            waits = func in _OTHERS or not _TAGS.isdisjoint(func.tags)
        if is_on_device and waits:
            self.note()
        result = func(*args, **kwargs)
        if is_on_device and not is_copy:
            self.mark(result)
        return result


class _Functions(TorchFunctionMode):
    """Notes what waits on a GPU and is no operator on a CPU."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits, self._written = waits, list[torch.device]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs, name = self._waits, kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        target = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        # The module's own device is a torch.device; one that is made of a text is the user's.
        is_written = isinstance(target, str) or any(target is device for device in self._written)
        is_to_host = name == "cpu" or (is_written and str(target).startswith("cpu"))
        if waits.has(first) and (is_to_host or name in _READS):
            waits.note()
        if waits.has(first) and is_to_host:
            copied = func(*args, **kwargs).clone()
            waits.storages.pop(copied.untyped_storage())
            return copied
        # Only a CPU checks the values then.
        waits.is_paused = name == "one_hot" and (len(args) > 1 or "num_classes" in kwargs)
        result = func(*args, **kwargs)
        waits.is_paused = False
        if func is torch.device and isinstance(first, str):
            self._written.append(result)
        if isinstance(target, torch.device) and not is_written:
            is_moved = name == "to" and isinstance(first, Tensor) and not waits.has(first)
            if name in ("tensor", "as_tensor") or (is_moved and not kwargs.get("non_blocking")):
                waits.note()
            waits.mark(result)
        return result
