"""The options of a run: for each its type, default, range and help."""

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from ..errors import ConfigurationError, shown
from .values import AtLeastTwo, NonNegativeInt, PositiveInt, PositiveNumber

_DURATION = re.compile(r"(\d{1,5}):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_UNITS = ("weeks", "days", "hours", "minutes", "seconds")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of ``Trainer``, and the options ``--trainer.NAME`` of the command line."""

    accelerator: str = "auto"
    """``"auto"``, ``"cpu"``, ``"gpu"``, or an engine's, such as ``"tpu"``."""
    devices: int | str | list[int] = "auto"
    """Number of devices, or which: ``2``, ``"0,2"``, ``[0, 2]``; ``-1`` or ``"auto"`` for all. On
    CPUs, the number of processes."""
    num_nodes: PositiveInt | None = None
    """Number of nodes, to check the launch by srun or torchrun, which is the default. Required if
    this command is started once per node (``NODE_RANK``)."""
    strategy: Any = "auto"
    """A registered name, a class path, ``"auto"``, or a ``Strategy`` object."""
    strategy_options: dict[str, Any] | None = None
    """Arguments of a strategy that is given by name."""
    precision: int | str = "32-true"
    """``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"`` (autocast); ``"bf16-true"`` or
    ``"16-true"`` (parameters, buffers and batches in half precision, without a gradient scaler)."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of float32 matrix products on GPUs: ``"highest"`` (float32), ``"high"`` (TF32) or
    ``"medium"``, as in ``torch.set_float32_matmul_precision``; default: ``"high"``, or the
    program's own setting. No effect on CPUs."""
    max_epochs: PositiveInt | None = None
    """Maximum number of epochs; ``None``: until ``max_steps`` or ``max_time``."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimizer steps; ``None``: until ``max_epochs``."""
    max_time: str | timedelta | dict[str, float] | None = None
    """Maximum duration of training, including that of earlier attempts if the run was resumed:
    ``"DD:HH:MM:SS"``, a ``timedelta``, or its arguments as a dict."""
    limit_train_batches: int | float = 1.0
    """Batches of each replica per epoch, a multiple of ``accumulate_grad_batches``; or the fraction
    of an epoch's optimizer steps."""
    limit_val_batches: int | float = 1.0
    """Batches of the loader, divided among all replicas, or their fraction; 0: no validation."""
    limit_test_batches: int | float = 1.0
    """Likewise, in test."""
    limit_predict_batches: int | float = 1.0
    """Likewise, in prediction."""
    overfit_batches: int | float = 0
    """Train in each epoch on the same batches, and validate on their samples; a number or fraction
    as in ``limit_train_batches``; 0: off."""
    fast_dev_run: bool | NonNegativeInt = False
    """Number of optimizer steps, and of validation batches, of a run that tries the code: one
    epoch, no checkpoints, no loggers. True: 1."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step over all devices; replaces the batch size of the training loader,
    so that a run gives the same result on any number of devices."""
    accumulate_grad_batches: PositiveInt = 1
    """Micro-batches per optimizer step."""
    gradient_clip_val: PositiveNumber | None = None
    """Maximum norm or value of gradients; ``None``: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    """``"norm"`` (global norm) or ``"value"`` (each element)."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale learning rates with the effective batch size: ``"none"``, ``"linear"`` or
    ``"sqrt"``."""
    reference_batch_size: PositiveInt | None = None
    """Effective batch size for which the learning rates were chosen; default: the batch size of one
    device."""
    learning_rate_warmup_steps: NonNegativeInt = 0
    """Linear warm-up steps to the scaled learning rate."""
    sync_batchnorm: bool = False
    """Synchronize BatchNorm statistics over all ranks."""
    compile: bool | dict[str, Any] = False
    """Compile the modules that steps call with ``torch.compile``; or a dict of options: ``mode``
    (``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``),
    ``dynamic`` (dynamic shapes), and ``regional``: compile repeated blocks, each class once, or the
    parts in a list of names. Parts named in ``activation_checkpointing`` are compiled apart."""
    activation_checkpointing: Sequence[str] = ()
    """Parts of the module that recompute their activations in backward: names of classes
    (``"Block"``), or paths, in which ``*`` matches any name (``"network.layers.*"``)."""
    seed: NonNegativeInt = 0
    """Seed of data order, workers, augmentation and, if the module is created after the trainer,
    its weights; default: that of ``seed_everything``, if it was called, not of ``torch``'s."""
    meta_device: bool = False
    """Create the parameters of modules inside :meth:`building` on the meta device; a strategy
    allocates them, one part at a time if it shards them. The command line creates the module inside
    it. The module's ``initialize`` sets the initial values."""
    deterministic: bool = False
    """Use only deterministic kernels."""
    cudnn_benchmark: bool | None = None
    """On GPUs, let cuDNN benchmark its algorithms for each new input shape of a convolution: faster
    if shapes stay the same. Default: as the program has set it, which is off in torch."""
    use_distributed_sampler: bool = True
    """Use the trainer's order of samples. False: read loaders as they are."""
    uneven_inputs: Literal["refuse", "join"] = "refuse"
    """If loaders are read as they are, and yield different numbers of batches on different ranks:
    ``"refuse"``, or ``"join"``, so that each sample still counts once. ``"join"`` also lets ranks
    without a last batch of an evaluation repeat one that does not count, for collectives in a
    step."""
    log_every_n_steps: PositiveInt = 50
    """Log every N optimizer steps; the first and the last are logged too."""
    record_hashes: bool | None = None
    """Record hashes of each step in the run directory, in which ``reproduce`` finds the first step
    that differs: True: of all steps; False: of none; default: of the first, the last, and with N
    of ``log_every_n_steps`` the steps N, 2 N, 4 N, 8 N and so on."""
    log_gradient_norm: bool = False
    """Log ``gradient_norm``, the norm over the whole model, also without clipping by norm, which
    computes it anyway."""
    peak_flops: PositiveNumber | None = None
    """Peak floating-point operations per second of one device in this precision, from its data
    sheet; logs the part of it that is used (MFU) as ``speed/mfu``. The module has
    ``flops_per_sample``."""
    check_val_every_n_epoch: PositiveInt = 1
    """Run validation every N epochs."""
    val_every_n_steps: PositiveInt | None = None
    """Also run validation every N optimizer steps."""
    sanity_check: NonNegativeInt = 1
    """Validation batches of each replica to run before the first step of a new run, so that an
    error in validation is found at the start; 0: none. Nothing is logged."""
    checkpoint_every_n_steps: PositiveInt | None = None
    """Save a checkpoint every N optimizer steps, and at ends of epochs."""
    checkpoint_every_n_epochs: PositiveInt = 1
    """Save a checkpoint at the end of every N-th epoch. The last step is always saved."""
    keep_checkpoints: AtLeastTwo = 2
    """Number of checkpoints to keep, at least 2."""
    callbacks: Sequence[Any] = ()
    """Callbacks of a fit: objects, class paths, names of built-in ones, or dicts with
    ``class_path`` and ``init_args``."""
    nonfinite_loss: Literal["stop", "skip", "ignore"] = "stop"
    """``"stop"``: stop with an error after a step whose loss is NaN or infinite, and save no
    non-finite parameters. ``"skip"``: skip steps whose gradients are not finite, on all ranks, and
    stop after 30 in a row; reads a number from the device in each step. With a gradient scaler
    (``"16-mixed"``) both skip such steps, until the scale falls below 1e-4. ``"ignore"``: no
    checks."""
    checkpoint_weights: Literal["all", "trainable"] = "all"
    """``"trainable"``: checkpoints leave out frozen parameters that nothing has changed, such as
    pretrained ones under adapters: the module has to give them again, which is checked."""
    async_checkpoints: bool = False
    """Write checkpoints while training continues."""
    resume: str | os.PathLike[str] | None = None
    """A run directory or a checkpoint to resume from; ``"auto"``: the newest checkpoint of
    ``run_name``, which is then required, or a new run if there is none."""
    resume_options: Literal["checkpoint", "code"] = "checkpoint"
    """What a resume uses where options of optimizers, constants of schedulers or frozen parameters
    differ, each of which a line says: ``"checkpoint"``, or ``"code"``, as if its schedule had been
    used from the start."""
    weights: str | os.PathLike[str] | None = None
    """Weights that a new run starts from, with new optimizers, at step 0: a run directory or a
    checkpoint, whose average (EMA) is used if it has one; or a ``.safetensors`` file, or a
    directory of them. A run that is resumed does not use it."""
    weights_strict: bool = True
    """Whether names and shapes must be those of the module. False: start from the weights that fit,
    and say which do not."""
    default_root_dir: str | os.PathLike[str] = "runs"
    """Directory that contains run directories."""
    run_name: str | None = None
    """Name of the run directory; default: the time. A directory that contains a run is an error,
    unless it is resumed or overwritten."""
    overwrite: bool = False
    """Replace the existing run in the directory. It is kept in the folder ``overwritten`` there
    until the new run has saved a checkpoint."""
    loggers: Sequence[Any] = ("csv", "tensorboard")
    """Loggers of a fit: ``"csv"``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, objects, class
    paths, or dicts with ``class_path``, ``init_args`` and ``name``."""
    enable_progress_bar: bool = True
    """Show step, loss, speed and remaining time. Without it only notes and warnings are printed, to
    stderr."""
    auto_select_gpus: bool = False
    """If ``devices`` is a number: select idle GPUs."""

    @property
    def changes_layers(self) -> bool:
        """Whether options change the layers of a module: how they compute, and what they keep."""
        names = ("compile", "activation_checkpointing")
        return any(getattr(self, name) is not getattr(Options, name) for name in names)

    @functools.cached_property
    def max_seconds(self) -> float | None:
        """``max_time`` in seconds; ConfigurationError if it is not a duration above 0."""
        if (max_time := self.max_time) is None:
            return None
        try:
            if isinstance(max_time, str):
                match = _DURATION.fullmatch(max_time)
                parts = map(int, match.groups()) if match else ()
                max_time = dict(zip(_UNITS[1:], parts, strict=True))
            duration = max_time if isinstance(max_time, timedelta) else timedelta(**max_time)
            seconds = duration.total_seconds()
        except (ValueError, TypeError, OverflowError):
            seconds = 0.0
        if seconds <= 0:
            forms = f"'DD:HH:MM:SS', or one or more of {', '.join(_UNITS)} as a dict"
            raise ConfigurationError(f"max_time={shown(self.max_time)}: give {forms}; above 0")
        return seconds
