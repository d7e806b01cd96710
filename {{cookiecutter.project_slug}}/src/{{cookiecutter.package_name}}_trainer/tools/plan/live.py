"""Counts the bytes of tensors that are alive, fake ones too, and their most at each moment."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COLLECTIVES = ("c10d", "_c10d_functional")


class Live(TorchDispatchMode):
    """Counts each storage once, from the operator that makes it until nothing refers to it.

    ``answers`` gives the results of operators that fake tensors cannot compute; ``asked`` has the
    names of those that it was asked for.
    """

    def __init__(self, answers: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers, self.asked = answers, set[str]()
        self.total = self.gradients = 0
        """Bytes that are alive; and of them, those that are gradients."""
        self.moments: dict[int, int] = {}
        """Bytes of gradients, and the most bytes of all else then, since :meth:`begin`."""
        self._watched: list[Tensor] = []
        self._sizes: dict[int, int] = {}
        self._gradients = set[int]()
        self._ends: dict[int, weakref.ref[Any]] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is created in this context."""
        self._mode, original = active_fake_mode(), torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            original(storage, size)
            if id(storage) in self._sizes:
                self._resize(id(storage), size)
                self._note()
            return storage

        # By it FSDP frees what it has gathered, and no operator shows that.
        with mock.patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield

    @property
    def most(self) -> int:
        """The most of :attr:`total` since :meth:`begin`."""
        return max(own + other for own, other in self.moments.items())

    def begin(self) -> None:
        """Forget moments."""
        self.moments = {}
        self._note()

    def find_gradients(self) -> None:
        """Note which storages are gradients now."""
        for each in self._watched:
            self.add(each.grad, is_gradient=True)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Count what is ever ``grad`` of these parameters as gradients."""
        self._watched = [each for each in parameters if each.requires_grad]
        for each in self._watched:
            each.register_post_accumulate_grad_hook(lambda p: self.add(p.grad, is_gradient=True))

    def add(self, tensor: Tensor | None, *, is_gradient: bool = False) -> None:
        """Count a tensor, or only that it is a gradient."""
        if tensor is None or tensor.layout != torch.strided:
            return
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            self._ends[key] = weakref.ref(storage, functools.partial(self._end, key))
            self._resize(key, storage.nbytes())
        if is_gradient and key not in self._gradients:
            self._gradients.add(key)
            self.gradients += self._sizes[key]
        self._note()

    def _resize(self, key: int, size: int) -> None:
        more, self._sizes[key] = size - self._sizes[key], size
        self.total += more
        self.gradients += more * (key in self._gradients)

    def _end(self, key: int, _: object) -> None:
        self._resize(key, 0)
        self._gradients.discard(key)
        del self._sizes[key], self._ends[key]

    def _note(self) -> None:
        other = self.total - self.gradients
        self.moments[self.gradients] = max(other, self.moments.get(self.gradients, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operators on its own tensors, which come here
        mode = active_fake_mode()  # None while meshes read real tensors
        if func is _WAIT and self._mode is not None:
            return args[0]  # a fake one would be a new tensor
        result = None
        if mode is not None and func in self._answers:
            result = self._answers[func](*args, **(kwargs or {}))
            if result is not None:
                self.asked.add(func._schema.name.partition("::")[2].strip("_"))
        if result is None:
            result = func(*args, **(kwargs or {}))
        if func.namespace in _COLLECTIVES:  # between two of them, FSDP sets gradients
            self.find_gradients()
        if mode is self._mode:  # DTensor computes shapes in a mode of its own
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self.add(each)
        return result
