"""Options that contradict a module: manual optimization, and batches that may be skipped."""

from ..module import TrainingModule
from ..options import Options
from ..strategies import Strategy
from ..strategies.limits import FEATURES


def problems_of(
    module: TrainingModule, strategy_name: str, strategy: Strategy, options: Options
) -> list[str]:
    """One line for each option, or strategy, that does not support what a module does."""
    name, refused = type(module).__name__, strategy.limits.refused
    unsupported = f"strategy={strategy_name!r} does not support"
    if module.automatic_optimization:
        used = ["skipped_batches"] * module.may_skip_batches
        if options.accumulate_grad_batches > 1:
            used += ["skipped_batches_of_a_step"] * module.may_skip_batches
        reasons = [(FEATURES[each], refused[each]) for each in used if each in refused]
        return [f"{unsupported} {does}, which {name} sets: {why}" for does, why in reasons[:1]]
    lines = []
    if reason := refused.get("manual_optimization"):
        does = f"manual optimization, and {name} uses manual optimization"
        lines.append(f"{unsupported} {does}: {reason}")
    its = "clip_gradients of its optimizers"
    given = {
        "gradient_clip_val": (options.gradient_clip_val is not None, f"call {its} instead"),
        "log_gradient_norm": (options.log_gradient_norm, f"log what {its} returns"),
        "nonfinite_loss='skip'": (
            options.nonfinite_loss == "skip",
            "do not call step if the loss is not finite on any rank, and use 'stop'",
        ),
        "accumulate_grad_batches": (
            options.accumulate_grad_batches != 1,
            "let it step in every n-th batch instead",
        ),
        "may_skip_batches": (module.may_skip_batches, "leave it out, and do not call step"),
    }
    return lines + [
        f"{option}: {name} uses manual optimization; {instead}"
        for option, (is_given, instead) in given.items()
        if is_given
    ]
