"""``deepspeed``: optimizer states, gradients and parameters sharded by DeepSpeed's ZeRO.

Source: https://www.deepspeed.ai/docs/config-json/, Rajbhandari et al. 2020
(https://arxiv.org/abs/1910.02054)
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import UserError, one_line
from ...launch.cluster import Layout
from ...launch.devices import choose_accelerator
from ...module import TrainingModule
from ...options import Options
from ...options.values import PositiveInt
from ..base import STAGES, Devices, RankLocal, Stage, StepModule, StepOutput
from ..engine_optimizers import EngineGroups, Noise
from ..gradients import sparse
from ..gradients.same_use import SameUse, trained
from ..limits import Limits
from ..memory import Memory, Sizes
from ..optimizer_state import group_names, parameter_names
from ..optimizers import Optimization
from ..precision import Precision
from ..process_group import ProcessGroupStrategy
from ..user_code import Freed, HookGuard, WeightGuard, forbid_calls
from . import ELSEWHERE, optimizers, process, settings
from .onebit_adam import CompressionErrors, OneBitAdam
from .optimizers import UnusedParameters, average_used
from .state import FlatSlices, ParameterSlices, ShardedState, Slices, clip_finite

_Config = Mapping[str, Any] | str | os.PathLike[str]
_INSTEAD = (
    "ZeRO keeps shards of them; to clip, set gradient_clip_val; gather weights of stage 3 by "
    "deepspeed.zero.GatheredParameters(…, modifier_rank=0); or use strategy='ddp' or 'fsdp'"
)
_MASTERS = "DeepSpeed steps parameters in float32; use 'bf16-mixed' or '16-mixed'"


class DeepSpeed(ProcessGroupStrategy):
    """DeepSpeed ZeRO, with any stage or with DeepSpeed's own configuration.

    Weights, gradients and optimizer states are in float32; forward passes run in the trainer's
    precision. A step with non-finite gradients is skipped.

    Args:
        config: DeepSpeed's own configuration, a dict or a JSON file, instead of all options below;
            default: the file named by TRAINER_DEEPSPEED_CONFIG or PL_DEEPSPEED_CONFIG_PATH.
        stage: ZeRO stage: 1 shards optimizer states, 2 (the default) also gradients, 3 also
            parameters; 0 shards nothing.
        offload_optimizer: Keep optimizer states on the CPU, and step there.
        offload_parameters: Keep stage 3's parameters on the CPU until they are used.
        reduce_bucket_size: Elements per gradient reduction; default: 4 million on CPUs; on GPUs a
            quarter of the model, at most DeepSpeed's 500 million.
        allgather_bucket_size: Elements per all-gather of weights; stage 3 prefetches this many, and
            keeps twice as many in memory. Default: 5 million on CPUs; on GPUs DeepSpeed's: 500
            million, or in stage 3 a prefetch of 50 million, and a billion kept.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(
        refused={
            "manual_optimization": "its engine runs one backward and one step at a time; use "
            "strategy='ddp'",
            "log_gradient_norm": "ZeRO computes it inside its step; use strategy='fsdp'",
            "skipping": "ZeRO computes the norm of the gradients inside its step; use "
            "strategy='fsdp'",
            "skipped_batches_of_a_step": "ZeRO does not average gradients that are averaged "
            "already; use strategy='fsdp'",
            "bf16-true": _MASTERS,
            "16-true": _MASTERS,
        },
        packages={"deepspeed": "make deepspeed, or pip install '.[deepspeed]'"},
    )
    engine: Any = None
    zero: Any = None
    slices: Slices
    sharded: ShardedState | None = None
    _accumulates = False

    def __init__(
        self,
        config: _Config | None = None,
        stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        reduce_bucket_size: PositiveInt | None = None,
        allgather_bucket_size: PositiveInt | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        chosen = settings.read(config)
        self.is_configured = chosen is not None
        if chosen is None:
            sizes = (reduce_bucket_size, allgather_bucket_size)
            named = 2 if stage is None else stage
            chosen = settings.defaults(named, offload_optimizer, offload_parameters, *sizes)
        self.config = chosen
        self.stage = settings.stage(self.config)
        self._named_stage = self.stage if stage is None else stage
        refused = dict(self.limits.refused)
        if self.stage == 3:
            instead = "its engine gathers and frees parameters itself; use 'deepspeed_stage_2'"
            refused |= dict.fromkeys(("parameter_averaging", "trainable_weights"), instead)
        self.limits = replace(
            self.limits,
            refused=refused,
            shards_parameters=self.stage == 3,
            needs_optimizers=settings.kind(self.config, "optimizer") is None,
        )

    def memory(self, sizes: Sizes) -> Memory:
        config = settings.completed(self.config)
        if not self.is_configured:
            config = settings.sized(config, sizes.accelerator, sizes.elements)
        zero = settings.section(config, "zero_optimization")
        return settings.zero_memory(sizes, self.stage, zero)

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is not None:
            return self._problems_of(module)
        if not self.is_configured:  # then no stage contradicts another
            return []
        lines = settings.contradictions(self.config, options)
        if self.stage != self._named_stage:
            configured = f"zero_optimization.stage={self.stage} in the DeepSpeed configuration"
            named = f"stage={self._named_stage} by the strategy's name or option"
            advice = "use strategy='deepspeed' without stage, which takes either"
            lines.insert(0, f"{configured}, and {named}; {advice}")
        accelerator = choose_accelerator(options.accelerator)
        if importlib.util.find_spec("deepspeed") is not None:  # otherwise that is reported
            lines += process.rejected(settings.completed(self.config), accelerator)
        return lines

    def _problems_of(self, module: TrainingModule) -> list[str]:
        unfit = [
            f"{name} {what}; use strategy='fsdp'"
            for name, parameter in module.named_parameters()
            for is_unfit, what in (
                (parameter.is_complex(), "is complex, which DeepSpeed does not support"),
                (self.stage == 3 and not parameter.numel(), "is empty: stage 3 cannot shard it"),
                (
                    not (parameter.is_floating_point() or parameter.is_complex()),
                    f"is {parameter.dtype}, which DeepSpeed does not support: make it a buffer",
                ),
            )
            if is_unfit
        ]
        dtypes = {str(tensor.dtype) for _, tensor in trained(module) if not tensor.is_complex()}
        if self.stage and len(dtypes) > 1:
            mixed = " and ".join(sorted(dtypes))
            unfit.append(f"ZeRO needs parameters of one dtype, not {mixed}; use strategy='ddp'")
        return sparse.problems_of(module, "ZeRO flattens gradients") + unfit

    def connect(self, layout: Layout, devices: Devices, precision: Precision) -> None:
        process.load(devices[0], layout)
        if settings.is_one_bit_adam(self.config):
            precision.skip_together()
        super().connect(layout, devices, precision)
        process.adopt_process_group(self.group_timeout)

    def place(self, module: TrainingModule) -> None:
        for parameter in module.parameters():
            parameter.__class__ = nn.Parameter if type(parameter) is Freed else type(parameter)
            parameter.data = parameter.data.contiguous()  # DeepSpeed broadcasts no others
        super().place(module)
        self._step_module = _AutocastStep(module, self.precision)
        self.steps = dict.fromkeys(STAGES, self._run_step)

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        named = dict(module.named_parameters())
        self._untouched = {name: set(vars(tensor)) for name, tensor in named.items()}
        made = optimizers.configured(self.config, module, configure)  # it may freeze parameters
        self._trains = [(name, tensor, tensor.requires_grad) for name, tensor in named.items()]
        config = settings.completed(self.config)
        if not self.is_configured:
            elements = sum(parameter.numel() for parameter in module.parameters())
            config = settings.sized(config, self.device.type, elements)
        config.pop("scheduler", None)  # the training loop steps it
        if settings.is_one_bit_adam(self.config):
            del config["optimizer"]
            made = Optimization([optimizers.one_bit_adam(self.config, module)], [])
        names = parameter_names(module)
        groups = [group for opt in made.optimizers for group in group_names(opt, names) if group]
        self.engine = self._initialize(config, made)
        # The configuration's optimizer steps all trained parameters.
        optimizer = self._find_shards(module, groups or [[name for name, _ in trained(module)]])
        configured = optimizers.configured_scheduler(self.config, optimizer)
        return Optimization([optimizer], [*made.schedulers, *configured])

    def _initialize(self, config: dict[str, Any], optimization: Optimization) -> Any:
        deepspeed = process.load(self.device, self.layout)
        scalars = [parameter for parameter in self.module.parameters() if parameter.dim() == 0]
        self.start_equal(scalars)
        try:
            # DeepSpeed and the compiler of its extensions write to standard output.
            with redirect_stdout(sys.stderr), process.not_broadcasting(scalars):
                engine, *_ = deepspeed.initialize(
                    # Index of the GPU, which need not be the local rank.
                    args=SimpleNamespace(device_rank=self.device.index or 0),
                    model=self._step_module,
                    optimizer=optimization.optimizers[0] if optimization.optimizers else None,
                    model_parameters=[parameter for _, parameter in trained(self.module)],
                    config=config,
                    dist_init_required=False,
                )
        except Exception as error:  # its compiler may raise anything
            if "optimizer" not in config:
                raise
            name = settings.kind(config, "optimizer")
            raise UserError(
                f"DeepSpeed cannot create {name} ({one_line(error)}); without a compiler, add "
                "torch_adam: true to the params of Adam or AdamW, or use configure_optimizers"
            ) from error
        return engine

    def _find_shards(self, module: TrainingModule, groups: list[list[str]]) -> Optimizer:
        """Locate the shards of DeepSpeed, and the optimizer that steps them."""
        self.zero = self.engine.optimizer if self.stage else None
        optimizer: Optimizer = self.engine.basic_optimizer
        if self.one_bit_adam is not None:
            self.rank_local = RankLocal(self._errors, self._load_errors)
        if self.zero is None:
            self._draws = Noise(module, [self.device])
            self.engine.enable_backward_allreduce = False  # average_used does it
            # Without ZeRO, the engine scales losses and steps with it.
            self.engine.torch_autocast_z0_gradscaler = self.precision.scaler
            return optimizer
        if self.zero.optimizer is not optimizer:  # an Adagrad, created again with a single group
            self.zero.optimizer.param_groups = optimizer.param_groups
            optimizer = self.zero.optimizer
            if self.stage < 3:
                self.zero._link_all_hp_params()
        parameters, is_3 = list(module.parameters()), self.stage == 3
        self.slices = ParameterSlices(self.zero, parameters) if is_3 else FlatSlices(self.zero)
        stepped = [parameter for _, parameter in trained(module)]
        self._unused = UnusedParameters(optimizer, self.slices, stepped)
        process.reduce_in_order(self.zero, stepped, self._unused.note)
        self.sharded = ShardedState(module, self.slices, optimizer, groups)
        self.same_use = SameUse(lambda: trained(module), ELSEWHERE, self.timeout_seconds)
        self._guard = HookGuard(module, _INSTEAD, self.slices.has_whole, "hidden")
        self._weight_guard = WeightGuard()
        named = dict(module.named_parameters())
        shown = [[named[name] for name in group] for group in groups]
        self.engine_groups = EngineGroups([optimizer], shown)
        self.around_hooks = self._around_hook
        if self.stage == 3:
            modules = module.named_modules()
            layers = {name: layer for name, layer in modules if [*layer.parameters(recurse=False)]}
            self.same_use.watch(layers, process.is_gathered)
            process.note_uses(module, self.same_use.note)
        return optimizer

    @contextmanager
    def _around_hook(self, hook: str) -> Iterator[None]:
        groups = self.engine_groups
        with groups.showing() if groups else nullcontext(), self._guard(hook):
            yield
        self.slices.keep_gathered()

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        if not self._accumulates:  # the first micro-batch of a step
            self._check_trained()
        self.engine.set_gradient_accumulation_boundary(synchronize)
        if self.zero is not None and self.precision.scaler is not None:
            self.zero.override_loss_scale(self.precision.scaler.get_scale())
        return super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)

    def _check_trained(self) -> None:
        for name, parameter, was_trained in self._trains:
            if parameter.requires_grad != was_trained:
                changed = "trained" if parameter.requires_grad else "frozen"
                reason = "since the fit began, and DeepSpeed steps what was trained then"
                advice = "set requires_grad before fit, or use strategy='fsdp'"
                raise UserError(f"{name} is {changed} {reason}; {advice}")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # Attention's fast path would use weights that stage 3 has not gathered.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fast and self.stage != 3)
        try:
            with super().evaluating():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = super().forward(stage, batch, batch_idx)
        if stage == "training" and self.same_use is not None and self.module.may_skip_batches:
            self.same_use.note("ends its forward")  # peers may wait in a layer, and not skip
        return outputs

    def _run_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if self.same_use is not None:
            self.same_use.begin(stage)
        # Stage 3's engine gathers parameters in evaluation too; without training there is none.
        if self.engine is not None and (stage == "training" or self.stage == 3):
            with ExitStack() as contexts:
                if self.stage == 3:
                    contexts.enter_context(self._guard.weights(f"{stage}_step"))
                    contexts.enter_context(self._weight_guard.layers(self._step_module, stage))
                elif self.zero is not None:
                    contexts.enter_context(self._guard.assigned())
                contexts.enter_context(process.explained())
                return self.engine(stage, batch, batch_idx)
        return self._step_module(stage, batch, batch_idx)

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        if self.same_use is not None:
            self.same_use.check(loss)
        with process.explained():
            self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        if synchronize and self.zero is None:
            compresses = self.one_bit_adam is not None and self.one_bit_adam.compresses
            average_used(self.engine, trained(self.module), averages=not compresses)
        if synchronize and self._accumulates and self.zero is not None:
            self.slices.finish_accumulation()
        self._accumulates = not synchronize

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        if self.zero is None:
            return super().clip(optimization, value, algorithm)
        if algorithm == "norm":
            self.zero.clip_grad = value  # clipped in DeepSpeed's step
        else:
            if self.slices.are_offloaded and self.device.type == "cuda":
                # Their copies to the CPU may be pending; DeepSpeed's own step waits for them.
                torch.cuda.synchronize(self.device)
            clip_finite(self.slices.gradients(), value * self.zero.loss_scale)
        return None

    def step(self, optimization: Optimization, *, ends: bool = True) -> None:
        if self.engine_groups is not None:
            self.engine_groups.check()
        if self.zero is not None:
            self.slices.take_weights()
        (optimizer,) = optimization.optimizers
        with nullcontext() if self.zero is not None else self._draws.alike(optimizer):
            self.engine.step()  # which resets the gradients
        if self.zero is not None:
            adapt_scale(self.precision.scaler, self.zero.overflow)
            self.slices.forget_gradients()
            self._unused.end_step(optimizer)
            if self.zero.overflow:
                self.precision.has_skipped = True

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        if self.sharded is None:
            return super().state(optimization)
        self.slices.take_weights()
        return self.sharded.state()

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        if self.sharded is not None:
            self.sharded.load(state)
            if self.stage == 3:
                for p in self.module.parameters():  # its second copy, of zero_hpz_partition_size
                    vars(p)["ds_secondary_tensor"] = None
            return
        for name, parameter in self.module.named_parameters():
            if parameter.numel() == 0 and name in state["model"]:  # freed by stage 3
                parameter.data = parameter.new_empty(state["model"][name].shape)
        super().load_state(state, optimization)

    @property
    def one_bit_adam(self) -> OneBitAdam | None:
        optimizer = self.engine.basic_optimizer if self.engine is not None else None
        return optimizer if isinstance(optimizer, OneBitAdam) else None

    def _errors(self) -> dict[str, Tensor]:
        adam, names = self.one_bit_adam, parameter_names(self.module)
        return {
            f"{names[id(parameter)]}/{kind}": getattr(errors, kind)
            for parameter, errors in (adam.errors.items() if adam is not None else ())
            for kind in ("sent", "served")
        }

    def _load_errors(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            if (adam := self.one_bit_adam) is not None and f"{name}/sent" in state:
                errors = adam.errors[parameter] = CompressionErrors(parameter.detach())
                errors.sent.copy_(state[f"{name}/sent"])
                errors.served.copy_(state[f"{name}/served"])

    def teardown(self) -> None:
        engine, self.engine, self.zero, self.sharded = self.engine, None, None, None
        if engine is not None:
            engine.destroy()
            process.clean(self.module, self._untouched)
            forbid_calls(self.module, only_empty=True)  # of stage 3
            for name in ("slices", "_unused", "_step_module"):  # they have hooks of the engine
                self.__dict__.pop(name, None)
        del engine
        gc.collect()  # else reference cycles keep the group and gloo's threads alive
        super().teardown()
        process.forget_process_group()


class _AutocastStep(StepModule):
    """A step in autocast: DeepSpeed's forward would disable one that was enabled outside."""

    def __init__(self, module: TrainingModule, precision: Precision) -> None:
        super().__init__(module)
        self._precision = precision

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        with self._precision.autocast():
            return super().forward(stage, batch, batch_idx)


def adapt_scale(scaler: torch.amp.GradScaler | None, overflowed: bool) -> None:
    """Update the scale after a DeepSpeed step, like the scaler's own ``update``."""
    if scaler is None:
        return
    state = scaler.state_dict()
    steps = 0 if overflowed else state["_growth_tracker"] + 1
    factor = state["backoff_factor"] if overflowed else 1.0
    if steps == state["growth_interval"]:
        steps, factor = 0, state["growth_factor"]
    scaler.load_state_dict({**state, "scale": state["scale"] * factor, "_growth_tracker": steps})
