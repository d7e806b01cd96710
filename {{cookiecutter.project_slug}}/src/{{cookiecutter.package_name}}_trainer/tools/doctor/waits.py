"""Where a training step makes the host wait for the device, by source line, found on the CPU.

The step runs on a real batch, so that its branches are the right ones. What a GPU would hold is
followed: parameters, buffers, the batch, and all that is computed from them or created on the
module's device. A tensor of the host, such as ``torch.rand(1)``, may be read without waiting.
"""

import contextlib
import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_VALUE = "reads a value (item, float, int, bool, if, print, format)"
_SIZE = "has a result whose size depends on values"
_HOST = "copies to the host"
# What a GPU answers only when it has computed all that was asked of it before.
_WAITS = {
    _aten._local_scalar_dense.default: _VALUE,
    _aten.equal.default: "compares (torch.equal)",
    _aten.allclose.default: "compares (torch.allclose)",
    _aten.nonzero.default: "nonzero, or an index by a mask",
    _aten.masked_select.default: f"masked_select {_SIZE}",
    _aten._unique2.default: f"unique {_SIZE}",
    _aten.unique_consecutive.default: f"unique_consecutive {_SIZE}",
    _aten.unique_dim.default: f"unique {_SIZE}",
    _aten.bincount.default: f"bincount {_SIZE}",
    _aten.repeat_interleave.Tensor: f"repeat_interleave without output_size {_SIZE}",
    _aten._linalg_check_errors.default: "checks the result of torch.linalg; use the _ex function",
}
_INDEXES = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
# What no operator shows, because it returns its argument on the CPU, or reads it directly.
_READS = {
    **dict.fromkeys(("cpu", "numpy", "__array__", "tolist"), _HOST),
    **dict.fromkeys(("__repr__", "__format__"), "prints or formats a tensor"),
}
_CREATES = ("tensor", "as_tensor")
_TRAINER = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib"))
_STANDARD = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<")


class Waits:
    """The lines of source at which the host would wait, in the context of :meth:`watching`.

    ``found``: what a line does, and the numbers of the batches in which it does. ``owner``: file of
    the user's model, whose package counts as source even if it is installed.
    """

    def __init__(self, owner: str) -> None:
        self.found: dict[str, tuple[str, set[int]]] = {}
        self.batch = 0
        self._owner = f"{Path(owner).parent}{os.sep}"
        # By storage, which views share, and as long as it is alive.
        self._on_device: Any = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what waits in this context."""
        with contextlib.ExitStack() as stack:
            for module in (torch.cuda, torch.accelerator):
                for name in ("synchronize", "empty_cache"):
                    if hasattr(module, name):  # torch.accelerator has not all in older versions
                        note = functools.partial(self._call, name)
                        stack.enter_context(mock.patch.object(module, name, note))
            stack.enter_context(_Operators(self))
            stack.enter_context(_Functions(self))
            yield

    def mark(self, value: Any, on_device: bool = True) -> None:
        """Note that the tensors in a value would be on the device, or on the host."""
        for each in tree_leaves(value):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                if on_device:
                    self._on_device[each.untyped_storage()] = True
                else:
                    self._on_device.pop(each.untyped_storage(), None)

    def has(self, value: Any) -> bool:
        """Whether a value is a tensor that would be on the device."""
        if not isinstance(value, Tensor):
            return False
        # A sparse tensor has no storage; one on the host is rare.
        return value.layout is not torch.strided or value.untyped_storage() in self._on_device

    def note(self, what: str) -> None:
        """Note that the running line of the user's source waits; the trainer's own are left out."""
        library, frame = "", inspect.currentframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if file != __file__ and (not file.startswith(_TORCH) or self._is_own(file)):
                if self._is_own(file):
                    line = linecache.getline(file, frame.f_lineno).strip()
                    place = f"{files.shown(Path(file), Path.cwd())}:{frame.f_lineno}: {line}"
                    does = f"{what}, in {library}" if library else what
                    self.found.setdefault(place, (does, set()))[1].add(self.batch)
                    return
                if file.startswith(_TRAINER):
                    return
                if not library and file.startswith(_INSTALLED):
                    library = "/".join(Path(file).parts[-2:])
            frame = frame.f_back

    def _is_own(self, file: str) -> bool:
        if file.startswith(self._owner):
            return True
        return not file.startswith((_TRAINER, *_INSTALLED, *_STANDARD, _TORCH))

    def _call(self, name: str, *_: Any, **__: Any) -> None:
        memory = " and returns memory that must be requested again" if name == "empty_cache" else ""
        self.note(f"{name} waits for all that was asked of the device{memory}")


class _Operators(TorchDispatchMode):
    """Follows tensors, and notes operators that wait."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        waits, kwargs = self._waits, kwargs or {}
        is_copy = func is _aten.copy_.default
        on_device = any(map(waits.has, tree_leaves((args, kwargs))))
        if is_copy:
            self._note_copy(*args, **kwargs)
        elif on_device and func in _WAITS:
            waits.note(_WAITS[func])
        elif on_device and func in _INDEXES and _has_mask(*args):
            waits.note("an index by a mask")
        result = func(*args, **kwargs)
        if on_device and not is_copy:  # which changes no tensor's device
            waits.mark(result)
        return result

    def _note_copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        source_has, to_has = self._waits.has(source), self._waits.has(to)
        if source_has != to_has and not non_blocking and (source_has or source.ndim):
            self._waits.note(_HOST if source_has else "copies from the host")


class _Functions(TorchFunctionMode):
    """Notes functions that wait, and are no operators of a CPU."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        waits, kwargs, name = self._waits, kwargs or {}, getattr(func, "__name__", "")
        run: Callable[[], Any] = functools.partial(func, *args, **kwargs)
        given = args[0] if args else None
        target = _target(name, args, kwargs)
        if name == "cpu" or (isinstance(given, Tensor) and _is_host(target)):
            if not waits.has(given):
                return run()
            waits.note(_HOST)
            copied = run()
            copied = copied.clone() if copied is given else copied
            waits.mark(copied, on_device=False)
            return copied
        if name in _READS and waits.has(given):
            waits.note(_READS[name])
        if target is None or _is_host(target):
            return run()
        is_moved = name == "to" and isinstance(given, Tensor) and not waits.has(given)
        if name in _CREATES or (is_moved and not kwargs.get("non_blocking")):
            waits.note("copies from the host")
        result = run()
        waits.mark(result)
        return result


def _target(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The device for which a call asks, if it does."""
    asked = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
    return asked if isinstance(asked, str | torch.device) else None


def _is_host(target: Any) -> bool:
    """Whether the host is meant: the module's own device is a ``torch.device`` here."""
    return isinstance(target, str) and target.startswith("cpu")


def _has_mask(_: Tensor, indices: Sequence[Any], values: Any = None, *__: Any) -> bool:
    if isinstance(values, Tensor) and values.numel() == 1:
        return False  # which fills where the mask is true
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
