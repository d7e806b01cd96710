"""What hooks and scripts exchange while a fit runs: it has an effect, or is refused in a line."""

from typing import Any

import pytest
from my_project_trainer import Callback, UserError
from test_public_programs import data
from test_public_reports import Model, make

pytestmark = pytest.mark.usefixtures("apart")


class Replaces(Model):
    """Exchanges a hook of its own, or a callback's, in epoch 1."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__()
        self.other, self.name = [owner], name

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            setattr(self.other[0] or self, self.name, lambda *_: 1)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(None, "on_train_batch_end"), (None, "count_weight"), (Callback(), "on_validation_end")],
)
def test_a_hook_that_is_replaced_in_a_fit_is_refused(owner: Any, name: str) -> None:
    made = make(callbacks=[owner] if owner else [])
    module = Replaces(owner, name)
    line = f"{type(owner or module).__name__}.{name} was replaced when the fit had begun"
    with pytest.raises(UserError, match=f"^{line}, without effect: set it in the class"):
        made.fit(module, data())
    assert made.global_step == 2


def test_the_script_s_trainer_has_the_facts_of_the_fit_that_runs() -> None:
    seen: list[Any] = []

    class Reads(Model):
        def on_train_epoch_end(self) -> None:
            here, there = made, self.trainer
            assert here.metrics == there.metrics != {}
            seen.append((here.global_step, here.current_epoch, here.run_directory))
            assert seen[-1] == (there.global_step, there.current_epoch, there.run_directory)

    made = make()
    for _ in range(2):
        made.fit(Reads(), data())
    assert [(step, epoch) for step, epoch, _ in seen] == [(2, 0), (4, 1), (6, 2)] * 2
    assert made.run_directory == seen[-1][2] != seen[0][2]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("should_stop", "; in a fit as it was: trainer of a module or callback has it"),
        ("train_dataloader", "; keep the loaders that you give to fit"),
        ("optimizers", ""),
        ("total_steps", ""),
    ],
)
def test_what_a_script_may_not_set_on_a_trainer(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"^{name} would have no effect{advice}$"):
        setattr(make(), name, [])
    made: Any = make()
    made.tokenizer = 1  # another trainer's argument, and a name that is free
    assert made.tokenizer == 1
