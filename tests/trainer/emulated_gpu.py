"""An emulated GPU: tensors whose numbers are on the CPU, and that report another device.

It runs what the trainer runs on a GPU, kernel by kernel, on the CPU, and raises where tensors are
on different devices. It counts, by source line, where a GPU would make the host wait for it
(``item``, ``nonzero``, a blocking copy) and which copies read pageable memory.

:func:`install` registers it as torch's PrivateUse1 device, for the rest of the process: use it in
processes of its own only. Streams compute at once, and what is used on another stream that has not
waited for it is an error. Not emulated: memory, kernels that compute in another order, backward
over several devices, and what a collective's future gives (DDP's communication hooks). Random
numbers are those of the CPU; after :func:`draw_by_offset`, their state is like CUDA's.

Source: torch.utils.backend_registration._setup_privateuseone_for_python_backend
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils, _pytree, backend_registration

from emulated_counts import note, note_operator
from emulated_philox import Philox

NAME = "emulated"
_aten = torch.ops.aten
# What a GPU answers only when it has computed all that was asked of it before.
_WAITS = {
    _aten._local_scalar_dense.default: "item",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.equal.default: "equal",
    _aten._unique2.default: "unique",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
}
# What takes tensors of several devices; `index` moves indices to the device of what they index.
_COPIES = {_aten.copy_.default, _aten._copy_from.default, _aten._to_copy.default}
_INDEXES = {_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default}
# torch.tensor calls the first with __torch_dispatch__ switched off, where a fallback is not found.
# The others would be given a tensor to make larger.
_KERNELS = (
    _aten._copy_from.default,
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
    *(_aten.randperm.default, _aten.eye.default, _aten.linspace.default),
)
# What autocast computes in half precision, and in float32.
_IN_HALF = ("linear", "matmul", "mm", "addmm", "bmm", "conv1d", "conv2d")
_IN_FLOAT = ("cross_entropy_loss", "mse_loss", "nll_loss", "binary_cross_entropy_with_logits")


class Stream:
    """A stream of the device: what it computes is there for another once that has waited for it."""

    def __init__(self, device: object = None) -> None:
        self.issued = 0
        self._waited: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        """Have what follows on this stream wait for all on another so far."""
        self._waited[other] = other.issued

    def check(self, tensor: "EmulatedTensor") -> None:
        """Raise if a tensor that is used on this stream may not be there yet, or no longer."""
        if tensor.stream is self:
            return
        if self._waited.get(tensor.stream, 0) < tensor.number:
            raise RuntimeError("a tensor is used on a stream that has not waited for it")
        if self not in tensor.recorded:
            raise RuntimeError("a tensor is used on another stream without record_stream")


class EmulatedTensor(Tensor):
    """A tensor on the emulated device; ``elem`` has its numbers.

    ``stream``: has made it, as the ``number``-th; ``recorded``: others that use it.
    """

    elem: Tensor
    stream: Stream
    number: int
    recorded: set[Stream]

    @staticmethod
    def __new__(cls, elem: Tensor, device: torch.device) -> "EmulatedTensor":
        made: EmulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=device,
        )
        made.elem = elem
        made.stream = _module.stream_now
        made.stream.issued += 1
        made.number, made.recorded = made.stream.issued, set()
        return made

    # With these, `Module.to` keeps the parameters the objects that they are, as it does for CUDA.
    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["elem"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], device: torch.device, size: object, stride: object
    ) -> "EmulatedTensor":
        return EmulatedTensor(inner["elem"], device)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, *args, **(kwargs or {}))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        self.recorded.add(stream)

    def tolist(self) -> Any:
        """The numbers, for which the host waits."""
        note("waits", "tolist")
        return self.elem.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.elem!r} on {self.device}"


class _DeviceModule(backend_registration._DummyBackendModule):
    """What ``torch.cuda`` is for CUDA."""

    _initialized = True  # asked before random states are kept, to compute activations again

    def __init__(self) -> None:
        self.current = 0
        self.generator: torch.Generator | Philox = torch.Generator()
        self.stream_now = Stream()

    Stream = Stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def current_stream(self, device: object = None) -> Stream:
        return self.stream_now

    def set_device(self, device: torch.device | int) -> None:
        self.current = device if isinstance(device, int) else device.index or 0

    def current_device(self) -> int:
        return self.current

    def device(self, index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        note("waits", "synchronize")

    def empty_cache(self) -> None:
        pass


_module = _DeviceModule()
_libraries: list[torch.library.Library] = []


def draw_by_offset() -> None:
    """Draw as CUDA does from now on: by seed and offset."""
    _module.generator = Philox()


def install() -> None:
    """Register the device with torch, for the rest of this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_module)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")  # for what makes tensors, of which it is given none
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    operators = torch.library.Library("aten", "IMPL")
    for func in _KERNELS:
        operators.impl(func, partial(_run, func), "PrivateUse1")
    for names, dtype in ((_IN_HALF, None), (_IN_FLOAT, torch.float32)):
        for name in names:
            func = getattr(_aten, name).default
            operators.impl(func, _casting(func, dtype), "AutocastPrivateUse1")
    _libraries.extend([everything, operators])
    _emulate_pinned_memory()
    _emulate_data()
    # By default as on a GPU: the optimizers' loops over all parameters at once.
    optimizer._foreach_supported_types.append(EmulatedTensor)
    _foreach_utils._foreach_supported_types.append(EmulatedTensor)


def _emulate_pinned_memory() -> None:
    pinned: dict[int, Tensor] = {}  # by where they are; kept, so that nothing else comes there

    def pin(tensor: Tensor) -> Tensor:
        return pinned.setdefault(_storage(tensor), tensor)

    def empty_like(tensor: Tensor, *, pin_memory: bool = False, **how: Any) -> Tensor:
        return pin(original(tensor, **how)) if pin_memory else original(tensor, **how)

    original = torch.empty_like
    replaced: dict[str, Any] = {
        "is_pinned": lambda self: _storage(self) in pinned,
        "pin_memory": lambda self: self if self.is_pinned() else pin(self.clone()),
    }
    torch.empty_like = empty_like
    for name, function in replaced.items():
        setattr(Tensor, name, function)


def _emulate_data() -> None:
    """Let ``tensor.data = …`` move a tensor to the device, as it does for CUDA."""
    inner: Any = Tensor.data

    def set_data(self: Tensor, value: Tensor) -> None:
        if isinstance(value, EmulatedTensor) and not isinstance(self, EmulatedTensor):
            kind = nn.Parameter if isinstance(self, nn.Parameter) else Tensor.detach
            torch.utils.swap_tensors(self, kind(value).requires_grad_(self.requires_grad))
        else:
            inner.__set__(self, value)

    Tensor.data = property(inner.__get__, set_data)  # type: ignore[assignment]


def _casting(func: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        if not isinstance(value, EmulatedTensor) or not value.is_floating_point():
            return value
        return value.to(dtype or torch.get_autocast_dtype(NAME))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = _pytree.tree_map(cast, (args, kwargs))
            return func(*args, **kwargs)

    return run


# --- a kernel -------------------------------------------------------------------------------------


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU for the device, if a GPU would."""
    note_operator(func.__name__)
    leaves = _pytree.tree_leaves((args, kwargs))
    emulated = [leaf for leaf in leaves if isinstance(leaf, EmulatedTensor)]
    plain = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, EmulatedTensor)
    ]
    for tensor in emulated:
        _module.stream_now.check(tensor)
    target = kwargs.get("device")
    if func in _COPIES:
        device = _copied_to(func, args, kwargs)
    elif emulated and target is None:
        device = emulated[0].device
        _check_devices(func, emulated, plain)
    else:
        device = None if target is None else torch.device(target)
    if emulated and func in _WAITS:
        note("waits", _WAITS[func])
    elif func in _INDEXES:
        _note_indices(args)
    if func is _aten._copy_from.default:
        func, args = _aten.copy_.default, (args[1], args[0])
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    args, kwargs = _pytree.tree_map(_numbers, (args, kwargs))
    count = max((leaf.numel() for leaf in emulated), default=1)
    with _drawing(func, count) if device is not None else contextlib.nullcontext():
        result = func(*args, **kwargs)
    return _wrapped(result, emulated, plain, device)


def _numbers(value: Any) -> Any:
    return value.elem if isinstance(value, EmulatedTensor) else value


def _wrapped(
    result: Any, emulated: Sequence[EmulatedTensor], plain: Sequence[Tensor], device: Any
) -> Any:
    known: dict[int, Tensor] = {id(tensor): tensor for tensor in plain}
    known |= {id(tensor.elem): tensor for tensor in emulated}
    is_here = device is not None and device.type == NAME

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, EmulatedTensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return EmulatedTensor(value, torch.device(NAME, device.index or 0)) if is_here else value

    return _pytree.tree_map(wrap, result)


def _check_devices(func: Any, emulated: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """Raise as CUDA's kernels do: a CPU tensor is taken where it is one number, if at all."""
    if func.namespace != "aten" or func in _INDEXES:
        return
    takes_numbers = not func.__name__.startswith(("_fused_", "_amp_"))
    others = [tensor for tensor in plain if tensor.dim() or not takes_numbers]
    devices = sorted({str(tensor.device) for tensor in (*emulated, *others)})
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {' and '.join(devices)} "
            f"in {func}"
        )


@contextlib.contextmanager
def _drawing(func: Any, count: int) -> Iterator[None]:
    """Draw so many random numbers from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    host, generator = torch.default_generator.get_state(), _module.generator
    is_philox = isinstance(generator, Philox)
    torch.default_generator.set_state(generator.begin() if is_philox else generator.get_state())
    try:
        yield
    finally:
        if is_philox:
            generator.end(count)
        else:
            generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(host)


# --- what the host waits for ----------------------------------------------------------------------


def _copied_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device that a copy ends on; it is counted."""
    if func is _aten._to_copy.default:
        source, to = args[0], torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
    else:
        to_first = func is _aten.copy_.default
        source, target = args[to_first], args[not to_first]
        to = target.device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if _storage(source) == _storage(target):
            return to  # the target's own numbers, which a collective's future gives
    _note_copy(source, to, non_blocking)
    return to


def _storage(tensor: Tensor) -> int:
    return _numbers(tensor).untyped_storage().data_ptr()  # type: ignore[no-any-return]


def _note_copy(source: Tensor, to: torch.device, non_blocking: bool) -> None:
    if source.device.type == to.type:
        return
    how = "to the device" if to.type == NAME else "to the host"
    if not non_blocking:
        note("waits", f"copy {how}")
    if to.type == NAME and not source.is_pinned():
        note("pageable", how)


def _note_indices(args: Sequence[Any]) -> None:
    indexed, indices = args[:2]
    for index in indices if isinstance(indexed, EmulatedTensor) else ():
        if isinstance(index, EmulatedTensor) and index.dtype in (torch.bool, torch.uint8):
            note("waits", "nonzero")
        elif isinstance(index, Tensor) and not isinstance(index, EmulatedTensor):
            _note_copy(index, indexed.device, non_blocking=False)
