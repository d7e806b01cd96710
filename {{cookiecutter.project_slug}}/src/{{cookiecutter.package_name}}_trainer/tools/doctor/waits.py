"""Where a training step makes the host wait for the device, by source line, found on the CPU.

The step runs on real numbers, so that its branches are the right ones. What a GPU would hold is
followed: parameters, buffers, the batch, and all that is computed from them or created on the
module's device. Reading a tensor of the host, such as ``torch.rand(1)``, does not wait.
"""

import contextlib
import inspect
import linecache
import os
import sysconfig
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

from ...launch import files

_aten = torch.ops.aten
# What a GPU answers only when it has computed all that was asked of it before.
_WAITS = {
    _aten._local_scalar_dense.default: "reads a value (item, float, bool, if, format)",
    _aten.repeat_interleave.Tensor: "repeat_interleave without output_size",
    **dict.fromkeys((_aten.equal.default, _aten.allclose.default), "compares tensors"),
    **dict.fromkeys((_aten.nonzero.default, _aten.masked_select.default), "selects by a mask"),
    **dict.fromkeys((_aten._unique2.default, _aten.unique_dim.default), "unique"),
    **dict.fromkeys((_aten.unique_consecutive.default, _aten.bincount.default), "counts values"),
    _aten.multinomial.default: "multinomial checks its values",
    _aten._linalg_check_errors.default: "a check of torch.linalg: use its _ex function",
}
_INDEXES = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
_TO_HOST, _FROM_HOST = "copies to the host", "copies from the host without non_blocking"
# What no operator shows, because the CPU reads it directly.
_READS = dict.fromkeys(("numpy", "__array__", "tolist"), _TO_HOST)
_READS |= dict.fromkeys(("__repr__", "__format__"), "prints or formats a tensor")
_TRAINER = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_PATHS = (sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
_FOLDERS = (*_PATHS, Path(torch.__file__).parent)
LIBRARIES = (_TRAINER, "<", *(f"{each}{os.sep}" for each in _FOLDERS))
"""With what the names of files begin that are not the user's."""


class Waits:
    """Notes the lines of source at which the host would wait.

    ``found``: by line, what it does, and the numbers of the batches in which it does. ``owner``:
    file of the user's model, whose folder counts as source even if it is installed.
    """

    def __init__(self, owner: str) -> None:
        self.found: dict[str, tuple[str, set[int]]] = {}
        self.batch, self.is_paused = 0, False
        self._owner = f"{Path(owner).parent}{os.sep}"
        self.storages: Any = WeakIdKeyDictionary()  # which views share

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what waits in this context."""
        names = ("synchronize", "empty_cache")
        calls: Any = {name: lambda *_, what=name, **__: self.note(what) for name in names}
        with mock.patch.multiple(torch.cuda, **calls), _Operators(self), _Functions(self):
            yield

    def mark(self, value: Any) -> None:
        """Note that the tensors in a value would be on the device."""
        for each in tree_leaves(value):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self.storages[each.untyped_storage()] = True

    def has(self, value: Any) -> bool:
        """Whether a value is a tensor that would be on the device."""
        is_strided = isinstance(value, Tensor) and value.layout is torch.strided
        return is_strided and value.untyped_storage() in self.storages

    def note(self, what: str) -> None:
        """Note that the user's line that is running waits; not what the trainer does itself."""
        frame = None if self.is_paused else inspect.currentframe()
        while frame is not None:
            file = frame.f_code.co_filename
            is_own = file.startswith(self._owner)
            if not is_own and file.startswith(_TRAINER) and file != __file__:
                return
            if is_own or not file.startswith(LIBRARIES):
                text = linecache.getline(file, frame.f_lineno).strip()
                place = f"{files.shown(Path(file), Path.cwd())}:{frame.f_lineno}: {text}"
                self.found.setdefault(place, (what, set()))[1].add(self.batch)
                return
            frame = frame.f_back


class _Operators(TorchDispatchMode):
    """Follows tensors, and notes operators that wait."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = self._waits, kwargs or {}
        if func is _aten.copy_.default:  # which changes the device of no tensor
            to_has, source_has = map(waits.has, args[:2])
            if to_has != source_has and args[1].ndim and not (*args, False)[2]:
                waits.note(_TO_HOST if source_has else _FROM_HOST)
            return func(*args, **kwargs)
        is_on_device = any(map(waits.has, tree_leaves((args, kwargs))))
        if is_on_device and func in _WAITS:
            waits.note(_WAITS[func])
        elif is_on_device and func in _INDEXES:
            has_mask = any(each is not None and each.dtype == torch.bool for each in args[1])
            if has_mask and not (len(args) > 2 and args[2].numel() == 1):  # which only fills
                waits.note("an index by a mask")
        result = func(*args, **kwargs)
        if is_on_device:
            waits.mark(result)
        return result


class _Functions(TorchFunctionMode):
    """Notes what waits on a GPU and is no operator on a CPU."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs, name = self._waits, kwargs or {}, getattr(func, "__name__", "")
        given = args[0] if args else None
        target = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        # The module's own device is a torch.device; text is what the user wrote.
        is_to_host = name == "cpu" or (isinstance(target, str) and target.startswith("cpu"))
        if is_to_host and waits.has(given):
            waits.note(_TO_HOST)
            copied = func(*args, **kwargs).clone()
            waits.storages.pop(copied.untyped_storage())
            return copied
        if name in _READS and waits.has(given):
            waits.note(_READS[name])
        # Only a CPU checks the values then.
        waits.is_paused = name == "one_hot" and (len(args) > 1 or "num_classes" in kwargs)
        result = func(*args, **kwargs)
        waits.is_paused = False
        if isinstance(target, torch.device):
            is_moved = name == "to" and isinstance(given, Tensor) and not waits.has(given)
            if name in ("tensor", "as_tensor") or (is_moved and not kwargs.get("non_blocking")):
                waits.note(_FROM_HOST)
            waits.mark(result)
        return result
