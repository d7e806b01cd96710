"""What earlier versions had is refused in one line, which says what to use instead."""

from typing import Any

import my_project_trainer as trainer
import pytest

SEQUENCES = (
    "processes do not split sequences; for long ones use strategy='fsdp' with "
    "activation_checkpointing"
)
SYNCHRONIZED = "use 'ddp' with accumulate_grad_batches, which averages gradients less often"
FAIRSCALE = "strategy='fairscale_fsdp' is unknown; use 'fsdp', which is PyTorch's own"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"strategy": "fairscale_fsdp", "strategy_options": {"min_num_params": 1}}, FAIRSCALE),
        ({"plugins": "fairscale_fsdp"}, FAIRSCALE),
        *(
            ({"strategy": name}, f"strategy='{name}' is unknown; {SYNCHRONIZED}")
            for name in ("local_sgd", "diloco")
        ),
        (
            {"strategy": "mesh", "strategy_options": {"pipeline": 2}},
            "strategy_options: mesh has no option 'pipeline': use strategy='sequential' and its "
            "stages, which keeps data parallelism",
        ),
        *(
            (
                {"strategy": name, "strategy_options": {"context": 2}},
                f"strategy_options: {name} has no option 'context': {SEQUENCES}",
            )
            for name in ("mesh", "tensor_parallel")
        ),
        (
            {"float8": ["Block"]},
            "float8: Trainer has no such argument; call torchao's convert_to_float8_training in "
            "__init__ of the module",
        ),
    ],
)
def test_one_line_says_what_to_use(options: dict[str, Any], line: str) -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", max_steps=1, **options)
    assert caught.value.problems == [line]


def test_the_functions_for_sequences_are_named_where_they_are_imported() -> None:
    with pytest.raises(ImportError, match=r"there is no sequence; use torch's .* 'fsdp'"):
        from my_project_trainer import sequence  # noqa: F401
    assert not hasattr(trainer, "sequences")
