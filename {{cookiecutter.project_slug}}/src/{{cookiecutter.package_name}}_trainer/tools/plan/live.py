"""Counts the bytes of tensors that are alive, fake ones too, and their most at each moment."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

    FSDP frees what it has gathered by ``storage.resize_``, which no operator shows, so that this
    method is replaced while the mode is on.
    """

    def __init__(self, answers: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers, self.asked = answers or {}, set[str]()
        self.total = self.gradients = 0
        """Bytes that are alive; and of them, those that are gradients."""
        self.most = 0
        """The most of :attr:`total` since :meth:`begin`."""
        self.moments: dict[int, int] = {}
        """Bytes of gradients, and the most bytes of all else at those moments."""
        self.watched: Sequence[Tensor] = ()
        """Parameters; what is their ``grad`` is a gradient."""
        self._known: dict[int, tuple[int, bool, Any]] = {}

    def find_gradients(self) -> None:
        """Note which storages are gradients now."""
        for each in self.watched:
            if each.grad is not None:
                self.add(each.grad, is_gradient=True)

    def begin(self) -> None:
        """Forget moments."""
        self.most, self.moments = self.total, {}
        self._note()

    def add(self, tensor: Tensor, *, is_gradient: bool = False) -> None:
        """Count a tensor, or only that it is a gradient."""
        if tensor.layout != torch.strided:
            return
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        size, was_gradient, weak = self._known.get(id(storage), (0, False, None))
        if weak is not None and (was_gradient or not is_gradient):
            return
        if weak is None:
            size = storage.nbytes()
            weak = weakref.ref(storage, functools.partial(self._drop, id(storage)))
            self.total += size
        self.gradients += size * is_gradient
        self._known[id(storage)] = size, is_gradient, weak
        self._note()

    def _drop(self, key: int, _: object) -> None:
        size, is_gradient, _ = self._known.pop(key, (0, False, None))
        self.total -= size
        self.gradients -= size * is_gradient

    def _resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        self._resize(storage, size)
        if id(storage) in self._known:
            before, is_gradient, weak = self._known[id(storage)]
            self._known[id(storage)] = size, is_gradient, weak
            self.total += size - before
            self.gradients += (size - before) * is_gradient
            self._note()
        return storage

    def _note(self) -> None:
        self.most = max(self.most, self.total)
        other = self.total - self.gradients
        if other > self.moments.get(self.gradients, 0):
            self.moments[self.gradients] = other

    def __enter__(self) -> "Live":
        self._mode, self._resize = active_fake_mode(), torch.UntypedStorage.resize_
        replaced: Any = torch.UntypedStorage

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            return self._resized(storage, size)

        replaced.resize_ = resize_
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        replaced: Any = torch.UntypedStorage
        replaced.resize_ = self._resize
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operators on its own tensors, which come here
        if func is _WAIT and self._mode is not None:
            return args[0]  # a fake one would be a new tensor
        result = None
        # Meshes read real tensors meanwhile.
        if func in self._answers and active_fake_mode() is not None:
            result = self._answers[func](*args, **(kwargs or {}))
            if result is not None:
                name = str(func).partition(".")[2].partition(".")[0].strip("_")
                self.asked.add("item" if name == "local_scalar_dense" else name)
        if result is None:
            result = func(*args, **(kwargs or {}))
        if func.namespace in _COLLECTIVES:  # between two of them, FSDP sets gradients
            self.find_gradients()
        if active_fake_mode() is self._mode:  # DTensor computes shapes in a mode of its own
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self.add(each)
        return result
