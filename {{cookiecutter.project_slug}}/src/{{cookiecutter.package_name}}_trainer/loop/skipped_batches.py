"""Batches that all ranks skip, because ``training_step`` returned ``None`` on one of them."""

import sys

from ..launch import collectives
from ..module import TrainingModule
from ..options import Options
from ..strategies import Strategy
from ..strategies.limits import FEATURES


def problems_of(
    module: TrainingModule, strategy_name: str, strategy: Strategy, options: Options
) -> list[str]:
    """One line if a module may skip batches where that is not supported."""
    if not module.may_skip_batches:
        return []
    name = type(module).__name__
    if not module.automatic_optimization:
        return [
            f"may_skip_batches: {name} uses manual optimization, and is not told which batches to "
            "skip: leave it out, and do not call the optimizers"
        ]
    used = ["skipped_batches"]
    if options.accumulate_grad_batches > 1:
        used.append("skipped_batches_of_a_step")
    return [
        f"strategy={strategy_name!r} does not support {FEATURES[each]}, which {name} sets: {reason}"
        for each in used
        if (reason := strategy.limits.refused.get(each))
    ][:1]


class SkippedBatches:
    """Counts the batches that were skipped; the same on every rank."""

    def __init__(self) -> None:
        self._count = 0

    def note(self) -> None:
        """Count a batch."""
        self._count += 1

    def tell(self, epoch: int) -> None:
        """Print how many batches of an epoch, counted from 0, were skipped, unless none was."""
        count, self._count = self._count, 0
        if count and collectives.rank() == 0:
            print(
                f"note: epoch {epoch + 1}: batches skipped because training_step returned None: "
                f"{count}",
                file=sys.stderr,
                flush=True,
            )
