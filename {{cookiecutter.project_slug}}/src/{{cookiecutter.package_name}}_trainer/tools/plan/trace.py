"""Traces training steps of one rank, with its own strategy: what is alive at each moment.

Its tensors are fake: they have shapes and need no memory. Its process group sends nothing.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...data.moving import mapped
from ...data.samples import batch_length
from ...launch import hangs, rendezvous
from ...logging import BatchContext
from ...loop.manual_optimization import ManualOptimization
from ...memory import activation_checkpointing
from ...module import TrainingModule
from ...run.plan import Plan
from ...run.rank import RankRun
from ...strategies import memory, optimizers, sync_batchnorm
from ...strategies.fsdp.fsdp import FSDP
from ...strategies.fsdp.units import choose_units
from ...strategies.gradients.averaging import GradientAverage
from ...strategies.gradients.same_use import SameUse
from ...strategies.precision import Precision

_CPU = torch.device("cpu")
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COLLECTIVES = ("c10d", "_c10d_functional")
_ATEN: Any = torch.ops.aten


class Trace(NamedTuple):
    """The sizes of a rank at the two batches, and what else a trace tells."""

    base: memory.Sizes
    doubled: memory.Sizes
    asked: Sequence[str]  # operators that waited for values
    rates: Sequence[float]  # learning rates of the optimizers
    elements: int  # of all parameters


def extrapolated(base: memory.Sizes, doubled: memory.Sizes, batch: float) -> memory.Sizes:
    """The sizes at ``batch`` times the batch of ``base``; ``doubled`` is at twice that batch.

    All that depends on a batch is linear in it, at each moment of backward.
    """
    later = dict(doubled.moments)
    moments = [
        (key, round(other + max(later.get(key, other) - other, 0) * (batch - 1)))
        for key, other in base.moments
    ]
    return replace(base, moments=[(key, max(other, 0)) for key, other in moments])


class PlannedRun(RankRun):
    """The run that a module sees: nothing is logged."""

    def __init__(self, plan: Plan, replicas: int, samples: int) -> None:
        super().__init__(plan, None, is_started=False)
        self.recorder: Any = SimpleNamespace(context=BatchContext(samples, samples))
        self.log = lambda *_, **__: None
        self.has_skipped_step = lambda: False
        self.strategy.device, self._replicas = _CPU, replicas

    def _data_replica(self) -> tuple[int, int]:
        return self._replicas, 0


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, fake ones too, and their most at each moment.

    Each storage counts once, from the operator that makes it until nothing refers to it.
    ``answers`` gives the results of operators that fake tensors cannot compute; ``asked`` has the
    names of those that it was asked for.
    """

    def __init__(self, answers: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers, self.asked = answers, set[str]()
        self.total = self.gradients = 0  # bytes that are alive; those that are gradients
        self.moments: dict[int, int] = {}
        """Bytes of gradients, and the most bytes of all else then, since :meth:`begin`."""
        self._watched: list[Tensor] = []
        self._sizes: dict[int, int] = {}
        self._gradients = set[int]()

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

    def begin(self) -> None:
        self.moments = {}
        self._note()

    def find_gradients(self) -> None:
        """Note which storages are gradients now."""
        for tensor in self._watched:
            self.add(tensor.grad, is_gradient=True)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Count what is ever ``grad`` of these parameters as gradients."""
        self._watched = [parameter for parameter in parameters if parameter.requires_grad]
        for tensor in self._watched:
            tensor.register_post_accumulate_grad_hook(lambda p: self.add(p.grad, is_gradient=True))

    def add(self, tensor: Any, *, is_gradient: bool = False) -> None:
        """Count a tensor, or only that it is a gradient; nothing else is counted."""
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if (key := id(storage)) not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._end, key)
            self._resize(key, storage.nbytes())
        if is_gradient and key not in self._gradients:
            self._gradients.add(key)
            self.gradients += self._sizes[key]
        self._note()

    def _resize(self, key: int, size: int) -> None:
        more, self._sizes[key] = size - self._sizes[key], size
        self.total += more
        self.gradients += more * (key in self._gradients)

    def _end(self, key: int) -> None:
        self._resize(key, 0)
        self._gradients.discard(key)
        del self._sizes[key]

    def _note(self) -> None:
        other = self.total - self.gradients
        self.moments[self.gradients] = max(other, self.moments.get(self.gradients, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls operators on its own tensors, which come here
        mode = active_fake_mode()  # None while meshes read real tensors
        if func is _WAIT and self._mode is not None:
            return args[0]  # a fake one would be a new tensor
        answer = None if mode is None else self._answers.get(func)
        result = None if answer is None else answer(*args, **(kwargs or {}))
        if result is None:
            result = func(*args, **(kwargs or {}))
        else:
            self.asked.add(func._schema.name.partition("::")[2].strip("_"))
        if func.namespace in _COLLECTIVES:  # between two of them, FSDP sets gradients
            self.find_gradients()
        if mode is self._mode:  # DTensor computes shapes in a mode of its own
            for leaf in tree_leaves(result):
                self.add(leaf)
        return result


def _item(x: Tensor) -> Any:
    return False if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1


def _masked(x: Tensor, indices: Any) -> Any:
    for k, mask in enumerate(indices):
        if mask is not None and mask.dtype in (torch.bool, torch.uint8):
            return x.new_empty((*x.shape[:k], mask.numel(), *x.shape[k + mask.dim() :]))
    return None


_ANSWERS: dict[Any, Any] = {  # bounds: item() is 1, `if tensor:` is false, a mask keeps all
    _ATEN._local_scalar_dense.default: _item,
    _ATEN.equal.default: lambda *_: True,
    _ATEN.nonzero.default: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    _ATEN.masked_select.default: lambda x, mask: x.new_empty((x + mask).numel()),
    _ATEN.index.Tensor: _masked,
}


def _deepcopy(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    copy = tensor.detach().clone()  # torch's own sets a storage: if fake, it corrupts memory
    copy = nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy
    memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copy


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    # torch's own swaps fake parameters, which may not have references.
    for child in module.children() if recurse else ():
        child._apply(change)
    for parameter in module.parameters(recurse=False):
        parameter.data = change(parameter.data)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors that are created in it are fake."""
    with (
        mock.patch.object(Tensor, "__deepcopy__", _deepcopy),
        mock.patch.object(nn.Parameter, "__deepcopy__", _deepcopy),
        mock.patch.object(nn.Module, "_apply", _apply),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextlib.contextmanager
def _fake_group(strategy: FSDP, on_gpus: bool) -> Iterator[None]:
    """Process groups that are initialized in it have no peers, and send nothing.

    The strategy, which sees fake CPU tensors, does what it would do on the plan's devices.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = unset_fake_temporarily()(strategy.make_mesh)
    mocks: dict[str, Any] = {"whole_blocks": on_gpus, "agree": lambda asks: asks, "make_mesh": mesh}
    with (
        mock.patch.dict("os.environ", {"TRAINER_BACKEND": "fake"}),
        mock.patch.object(rendezvous, "connect_store", return_value=FakeStore()),
        mock.patch.object(hangs, "limited", contextlib.nullcontext),
        mock.patch.multiple(strategy, **mocks),
        mock.patch.object(SameUse, "note"),  # they would ask the peers, or copy gradients
        mock.patch.object(GradientAverage, "average"),
        # A mesh reads the ranks that it is made of.
        mock.patch.object(DeviceMesh, "__init__", unset_fake_temporarily()(DeviceMesh.__init__)),
    ):
        yield


def trace(
    plan: Plan, build: Callable[[], TrainingModule], batches: Sequence[Any], is_fake: bool = True
) -> Trace:
    """Trace a step of each batch; the first one lets optimizers create their states.

    ``plan``: of the run, with its strategy, a :class:`FSDP` or one of a process alone; ``batches``:
    two micro-batches on the CPU. Unless ``is_fake``, real steps are made.
    """
    torch.set_num_threads(1)
    gc.disable()  # it takes long, and would make what is alive depend on when it runs
    options, strategy, live = plan.options, plan.strategy, Live(_ANSWERS if is_fake else {})
    precision = Precision(str(options.precision), "cpu")
    precision.scaler = None  # a scale, whose value would say that steps are skipped
    with contextlib.ExitStack() as stack:
        if isinstance(strategy, FSDP):
            stack.enter_context(_fake_group(strategy, plan.device.type != "cpu"))
        strategy.connect(plan.layout, [_CPU], precision)
        stack.callback(strategy.teardown)
        if is_fake:
            stack.enter_context(fake_tensors())
        stack.enter_context(live.counting())
        module = build()
        module.train()
        run = PlannedRun(plan, strategy.data.replicas, batch_length(batches[0]))
        stack.enter_context(run.running(module, "fit", None))
        elements = sum(parameter.numel() for parameter in module.parameters())
        numels = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
        unit = largest_unit(module, plan.device.type != "cpu")
        stack.enter_context(activation_checkpointing.applied(module, run.checkpointing))
        steps = _Steps(plan, module, run, live)
        sizes = steps.sizes(batches)
        rates = steps.optimization.configured_rates()
    base, doubled = (replace(size, numels=numels, unit=unit) for size in sizes)
    return Trace(base, doubled, sorted(live.asked), rates, elements)


def largest_unit(module: TrainingModule, on_gpus: bool) -> int:
    """The bytes of the largest unit that ``fsdp`` would gather."""
    units = choose_units(module, None, 1_000_000, whole_blocks=on_gpus)
    counted, largest = set[Tensor](), 0
    for unit in (*(unit for _, unit in units), module):  # inner units first
        new = set(unit.parameters()) - counted
        largest = max(largest, sum(p.numel() * p.element_size() for p in new))
        counted |= new
    return largest


class _Steps:
    def __init__(self, plan: Plan, module: TrainingModule, run: PlannedRun, live: Live) -> None:
        self.strategy, self.options, self.live = plan.strategy, plan.options, live
        if self.options.sync_batchnorm and not isinstance(self.strategy, FSDP):
            sync_batchnorm.convert(module, "cpu")
        self.optimization = self.strategy.setup(module, lambda: optimizers.configured(module))
        for optimizer in self.optimization.optimizers if plan.device.type != "cpu" else ():
            for group in (*optimizer.param_groups, optimizer.defaults):
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # as torch does on GPUs, in one operation for all
        self.manual: ManualOptimization | None = None
        if not module.automatic_optimization:
            run.manual = self.manual = ManualOptimization(self.strategy, self.optimization)
        live.watch(module.parameters())

    def sizes(self, batches: Sequence[Any]) -> list[memory.Sizes]:
        gc.collect()
        parameters = self.live.total
        # Modules with manual optimization may step in some of the batches only.
        for number in range(0 if self.manual is None else 4):
            self._step(batches[0], number)
        steps = [self._step(batch, 4 + number) for number, batch in enumerate(batches)]
        gc.collect()
        return [
            memory.Sizes(
                parameters=parameters,
                gradients=max(grads for grads, _ in seen),
                optimizer=self.live.total - parameters,
                moments=sorted((grads, max(other, 0)) for grads, other in seen),
                step=steps[-1][1],  # the first one makes states
                numels=[],
            )
            for seen, _ in steps
        ]

    def _step(self, batch: Any, number: int) -> tuple[list[tuple[int, int]], int]:
        """Make a step; its moments, and the temporary results of optimizers."""
        live, options = self.live, self.options
        gc.collect()
        before = live.total
        live.begin()
        parts = min(options.accumulate_grad_batches, 2)  # from the second on, they are alike
        for i in range(1, parts + 1):
            copy = mapped(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
            if self.manual is None:
                self.strategy.forward_backward(copy, number, weight=1.0, synchronize=i == parts)
            else:
                self.manual.run(copy, number)
            del copy
        live.find_gradients()
        seen = [(grads, other - before) for grads, other in live.moments.items()]
        live.begin()
        held = live.total
        if self.manual is None:
            if (value := options.gradient_clip_val) is not None:
                self.strategy.clip(self.optimization, value, options.gradient_clip_algorithm)
            self.strategy.step(self.optimization)
        return seen, max(grads + other for grads, other in live.moments.items()) - held
