"""Read the keywords of ``Trainer`` into :class:`~.fields.Options`, and check them together."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import Problems, foreign, nearest
from . import values
from .fields import Options

_PATHS = ("default_root_dir", "resume", "weights")
_CHECKED_LATER = ("activation_checkpointing", "callbacks", "loggers")  # have checks of their own
_STAGES = ("train", "val", "test", "predict")
_LIMITS = (*(f"limit_{stage}_batches" for stage in _STAGES), "overfit_batches")
_LIMITS_OF = {
    "fit": ("limit_train_batches", "limit_val_batches", "overfit_batches"),
    "validate": ("limit_val_batches",),
    "test": ("limit_test_batches",),
    "predict": ("limit_predict_batches",),
}
USED_IN_EVALUATION = {
    *("accelerator", "devices", "num_nodes", "auto_select_gpus", "strategy", "strategy_options"),
    *("precision", "matmul_precision", "deterministic", "cudnn_benchmark", "seed", "meta_device"),
    *("fast_dev_run", "use_distributed_sampler", "uneven_inputs", "default_root_dir", "run_name"),
    "enable_progress_bar",
}
"""Options that validate, test and predict use, beside their limits."""
_OR_NONE = {"limit_val_batches": ", or 0 for no validation", "overfit_batches": ", or 0"}
_TRANSLATED = ("accelerator", "devices", "strategy", "precision")

_NOT_GIVEN = {"seed": None, "max_epochs": -1, "max_steps": -1}  # Lightning's defaults
_TODAY = {  # other values of these may be older spellings, and so are unknown names
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"),
}
SEEDED: dict[str, int] = {}  # the default ``seed``, once ``seed_everything`` was called
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def accepts_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[T, Options, Problems], None]], Callable[Concatenate[T, P], None]]:
    """Decorate an ``__init__`` whose keywords are the fields of :class:`Options`.

    It receives the options, with the default in place of each invalid one, and the problems found.
    """
    declared = inspect.signature(options)

    def decorate(init: Callable[[T, Options, Problems], None]) -> Callable[Concatenate[T, P], None]:
        @functools.wraps(init)
        def __init__(self: T, /, *arguments: P.args, **kwargs: P.kwargs) -> None:
            declared.bind_partial(*arguments)
            problems = Problems()
            init(self, read(kwargs, problems), problems)

        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [self_parameter, *declared.parameters.values()]
        __init__.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
        return __init__

    return decorate


def accepts_foreign(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorate a method: keywords that it lacks may be those of other trainers."""
    known = [*inspect.signature(method).parameters][1:]
    owner, _, name = method.__qualname__.rpartition(".")
    called = owner if name == "__init__" else name

    @functools.wraps(method)
    def call(self: T, /, *arguments: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.keys() - known:
            foreign.load()
            kwargs = foreign.keywords(called, known[: len(arguments)], kwargs)  # type: ignore[assignment]
        return method(self, *arguments, **kwargs)

    return call


def read(kwargs: Mapping[str, Any], problems: Problems) -> Options:
    """Read the user's keywords in any spelling; a default replaces each invalid one."""
    defaults = {field.name: field.default for field in fields(Options)}
    kwargs = {name: values.plain_number(value) for name, value in kwargs.items()}
    for name, value in _NOT_GIVEN.items():
        if type(kwargs.get(name, "")) is type(value) and kwargs[name] == value:
            del kwargs[name]
    kwargs = SEEDED | kwargs
    spelled = ((kwargs.get(name, names[0]), names) for name, names in _TODAY.items())
    is_older = any(not isinstance(value, str) or value not in names for value, names in spelled)
    if is_older or kwargs.keys() - defaults:
        foreign.load()
    known = {*defaults, *foreign.types}
    for name in [name for name in kwargs if name not in known]:
        problems.add(f"{name}: Trainer has no such argument{nearest(name, defaults, 'argument')}")
        del kwargs[name]
    # After an error, those that are not translated.
    valid = {name: kwargs[name] for name in kwargs if name in defaults and name not in _TRANSLATED}
    with problems:
        valid = foreign.translate(kwargs)
    checked = [name for name in valid if name not in _CHECKED_LATER]
    changed = {name: valid[name] for name in checked if valid[name] is not defaults[name]}
    for name in values.check(values.hints(Options), changed, problems):
        del valid[name]
    for name in _PATHS:
        if isinstance(path := valid.pop(name, None), str | os.PathLike):
            with problems:
                valid[name] = values.expand_path(name, path)
    return Options(**valid)


def check(options: Options, problems: Problems) -> None:
    """Check options against each other; ``problems`` collects one line per error."""
    problems.lines += _limits(options)
    if options.cudnn_benchmark and options.deterministic:
        both = "cudnn_benchmark=True with deterministic=True"
        reason = "which algorithm is fastest differs from run to run, and so do the last bits"
        problems.add(f"{both}: {reason}; leave cudnn_benchmark out")
    rule = options.learning_rate_scaling
    if rule != "none" and options.global_batch_size and options.reference_batch_size is None:
        advice = "give reference_batch_size, the batch that the rate was chosen for"
        problems.add(f"learning_rate_scaling={rule!r} with global_batch_size: {advice}")
    if options.uneven_inputs == "join" and options.sync_batchnorm:
        both = "uneven_inputs='join' with sync_batchnorm=True"
        why = "a rank whose loader has ended repeats a batch, which would count in the statistics"
        problems.add(f"{both}: {why}; give each rank as many batches")
    if options.resume is None and options.resume_options != "checkpoint":
        problems.add(f"resume_options={options.resume_options!r}: only with resume")
    if options.weights is None and not options.weights_strict:
        problems.add("weights_strict=False: only with weights, and none are given")
    with problems:
        options.max_seconds  # noqa: B018


def _limits(options: Options) -> Iterator[str]:
    accumulate, overfit = options.accumulate_grad_batches, options.overfit_batches
    for name in _LIMITS:
        value = getattr(options, name)
        is_number, is_none = type(value) is int, value == 0 and name in _OR_NONE
        if not (is_none or (value >= 1 if is_number else 0 < value <= 1)):
            advice = "give a number of batches, or a fraction above 0 and up to 1.0"
            yield f"{name}={value!r}: {advice}{_OR_NONE.get(name, '')}"
        elif is_number and value % accumulate and name in (_LIMITS[0], _LIMITS[-1]):
            taken = f"an optimizer step takes accumulate_grad_batches={accumulate} batches"
            yield f"{name}={value}: {taken}; give a multiple of {accumulate}"
        elif overfit and name in _LIMITS[:2] and (is_number or value != 1.0):
            both = f"overfit_batches={overfit!r} and {name}={value!r}"
            yield f"{both} each select batches; give only one of them"


def notes(options: Options, command: str) -> list[str]:
    """The line that names the limits of a command, if there are any."""
    limits = [
        f"{name}={value!r}"
        for name in _LIMITS_OF[command]
        if (value := getattr(options, name)) != getattr(Options, name) or type(value) is int
        if value or name != "overfit_batches"
    ]
    return [f"limited by {', '.join(limits)}"] if limits and not options.fast_dev_run else []


def unused(command: str, names: Iterable[str]) -> list[str]:
    """Options of these names that fit, validate, test or predict does not use."""
    known = {*_LIMITS} if command == "fit" else {*vars(Options())} - USED_IN_EVALUATION
    return [name for name in names if name in known - {*_LIMITS_OF.get(command, known)}]
