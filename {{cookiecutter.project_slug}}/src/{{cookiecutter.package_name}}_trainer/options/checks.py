"""Check options that contradict each other, and those that limit a run to some batches."""

from collections.abc import Iterator

from ..errors import Problems
from .fields import Options

_STAGES = ("train", "val", "test", "predict")
_LIMITS = (*(f"limit_{stage}_batches" for stage in _STAGES), "overfit_batches")
_OR_NONE = {"limit_val_batches": ", or 0 for no validation", "overfit_batches": ", or 0"}


def check(options: Options, problems: Problems) -> None:
    """Check options against each other; ``problems`` collects one line per error."""
    problems.lines += _limits(options)
    if options.cudnn_benchmark and options.deterministic:
        problems.add(
            "cudnn_benchmark=True with deterministic=True: which algorithm is fastest differs from "
            "run to run, and so do the last bits; leave cudnn_benchmark out"
        )
    rule = options.learning_rate_scaling
    if rule != "none" and options.global_batch_size and options.reference_batch_size is None:
        problems.add(
            f"learning_rate_scaling={rule!r} with global_batch_size: give reference_batch_size, "
            "the batch that the rate was chosen for"
        )
    if options.uneven_inputs == "join" and options.sync_batchnorm:
        problems.add(
            "uneven_inputs='join' with sync_batchnorm=True: a rank whose loader has ended repeats "
            "a batch, which would count in the statistics; give each rank as many batches"
        )
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
            yield (
                f"{name}={value!r}: give a number of batches, or a fraction above 0 and up to 1.0"
                f"{_OR_NONE.get(name, '')}"
            )
        elif is_number and value % accumulate and name in (_LIMITS[0], _LIMITS[-1]):
            yield (
                f"{name}={value}: an optimizer step takes accumulate_grad_batches={accumulate} "
                f"batches; give a multiple of {accumulate}"
            )
        elif overfit and name in _LIMITS[:2] and (is_number or value != 1.0):
            yield (
                f"overfit_batches={overfit!r} and {name}={value!r} each select batches; give only "
                "one of them"
            )


def notes(options: Options) -> list[str]:
    """The line that names the limits of a run, if there are any."""
    given = [
        f"{name}={value!r}"
        for name in _LIMITS
        if (value := getattr(options, name)) != getattr(Options, name) or type(value) is int
        if value or name != "overfit_batches"
    ]
    return [f"limited by {', '.join(given)}"] if given and not options.fast_dev_run else []
