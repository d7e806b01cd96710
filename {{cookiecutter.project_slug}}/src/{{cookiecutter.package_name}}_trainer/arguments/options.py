"""The options of a run, typed and frozen: what all checks and all parts of a run read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of ``Trainer``, where each is described, without the older spellings.

    A field has the keyword's type, or a narrower one after reading (``keywords.py``): ``None``
    became ``"auto"``, a path is an expanded string, and a precision is a name.
    """

    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int | None = None
    strategy: object = "auto"
    """A name, or a strategy, whose class is on a higher floor."""
    strategy_options: dict[str, Any] | None = None
    precision: str = "32-true"
    matmul_precision: str | None = None
    max_epochs: int | None = None
    max_steps: int | None = None
    max_time: float | None = None
    """In seconds."""
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0
    fast_dev_run: int = 0
    global_batch_size: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    learning_rate_scaling: str = "none"
    reference_batch_size: int | None = None
    learning_rate_warmup_steps: int = 0
    sync_batchnorm: bool = False
    compile: bool | dict[str, Any] = False
    activation_checkpointing: Sequence[str] = ()
    seed: int = 0
    meta_device: bool = False
    deterministic: bool = False
    cudnn_benchmark: bool | None = None
    use_distributed_sampler: bool = True
    uneven_inputs: str = "refuse"
    log_every_n_steps: int = 50
    log_gradient_norm: bool = False
    peak_flops: float | None = None
    check_val_every_n_epoch: int = 1
    val_every_n_steps: int | None = None
    sanity_check: int = 1
    checkpoint_every_n_steps: int | None = None
    checkpoint_every_n_epochs: int = 1
    keep_checkpoints: int = 2
    callbacks: Sequence[Any] = ()
    """Callbacks, whose class is on a higher floor."""
    nonfinite_loss: str = "stop"
    async_checkpoints: bool = False
    resume: str | None = None
    weights: str | None = None
    weights_strict: bool = True
    default_root_dir: str = "runs"
    run_name: str | None = None
    overwrite: bool = False
    loggers: Sequence[Any] = ("csv", "tensorboard")
    """Loggers, whose class is on a higher floor."""
    enable_progress_bar: bool = True
    auto_select_gpus: bool = False
