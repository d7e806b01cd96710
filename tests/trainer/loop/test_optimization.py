"""What ``configure_optimizers`` may return, and optimizer state by parameter name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from my_project_trainer import errors
from my_project_trainer.strategies import optimizer_state as states
from my_project_trainer.strategies import optimizers as optimization
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

FIRST, SECOND = SGD([nn.Parameter(torch.ones(2))], lr=1.0), Adam([nn.Parameter(torch.ones(1))])
STEPS = StepLR(FIRST, 1)
PLATEAU = ReduceLROnPlateau(FIRST)


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedules"),
    [
        (FIRST, [FIRST], []),
        ([FIRST, SECOND], [FIRST, SECOND], []),
        ((FIRST, SECOND), [FIRST, SECOND], []),
        (([FIRST], []), [FIRST], []),
        (([FIRST], [STEPS]), [FIRST], [(STEPS, "epoch", None)]),
        ([[FIRST], (STEPS,)], [FIRST], [(STEPS, "epoch", None)]),
        (
            ([FIRST, SECOND], [{"scheduler": STEPS, "interval": "step"}]),
            [FIRST, SECOND],
            [(STEPS, "step", None)],
        ),
        ({"optimizer": FIRST}, [FIRST], []),
        ({"optimizer": FIRST, "lr_scheduler": STEPS}, [FIRST], [(STEPS, "epoch", None)]),
        (
            {"optimizer": FIRST, "lr_scheduler": {"scheduler": PLATEAU, "monitor": "val_loss"}},
            [FIRST],
            [(PLATEAU, "epoch", "val_loss")],
        ),
        (
            [{"optimizer": FIRST, "lr_scheduler": STEPS}, {"optimizer": SECOND}],
            [FIRST, SECOND],
            [(STEPS, "epoch", None)],
        ),
    ],
)
def test_accepted(returned: Any, optimizers: list[Optimizer], schedules: list[Any]) -> None:
    read = optimization.read_optimization(returned)
    assert read.optimizers == optimizers
    assert [(s.scheduler, s.interval, s.monitor) for s in read.schedulers] == schedules


RETURNED = (
    "configure_optimizers returned {}; return an optimizer, a list of optimizers, ([optimizers], "
    "[schedulers]), or dicts with 'optimizer' and 'lr_scheduler'"
)
NO_OPTIMIZER = "configure_optimizers gave {} where an optimizer belongs"
NO_SCHEDULER = (
    "lr_scheduler {}; give one that derives from LRScheduler, or a dict of 'scheduler', 'interval' "
    "and 'monitor'; step another kind in on_train_epoch_start"
)


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (None, RETURNED.format("NoneType")),
        (SGD, RETURNED.format("type")),
        ([], RETURNED.format("list")),
        ([FIRST, STEPS], RETURNED.format("list")),
        ((FIRST, [STEPS]), RETURNED.format("tuple")),
        ({"lr_scheduler": STEPS}, NO_OPTIMIZER.format("NoneType")),
        (([STEPS], [FIRST]), NO_OPTIMIZER.format("StepLR")),
        (([FIRST], ["cosine"]), NO_SCHEDULER.format("'cosine'")),
        ({"optimizer": FIRST, "lr_scheduler": None}, NO_SCHEDULER.format("None")),
        (([FIRST], [{"interval": "step"}]), NO_SCHEDULER.format("{'interval': 'step'}")),
        (
            ([FIRST], [{"scheduler": PLATEAU}]),
            "ReduceLROnPlateau needs 'monitor': the name of a logged value",
        ),
        (
            ([FIRST], [{"scheduler": STEPS, "interval": "batch"}]),
            "lr_scheduler interval='batch': use 'step' or 'epoch'",
        ),
    ],
)
def test_refused(returned: Any, line: str) -> None:
    with pytest.raises(errors.ConfigurationError) as raised:
        optimization.read_optimization(returned)
    assert raised.value.problems == [line]


def test_an_unknown_entry_of_a_scheduler_s_dict_is_refused() -> None:
    returned = {"optimizer": FIRST, "lr_scheduler": {"scheduler": STEPS, "frequency": 2}}
    with pytest.raises(errors.ConfigurationError, match="'frequency' is not") as raised:
        optimization.read_optimization(returned)
    advice = "; multiply the scheduler's own lengths by it, such as step_size"
    assert raised.value.problems[0].endswith(advice)


@pytest.mark.parametrize("misspelled", ["scheduler", "lr_schedulers"])
def test_a_misspelt_scheduler_is_not_dropped_silently(misspelled: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=misspelled):
        optimization.read_optimization({"optimizer": FIRST, misspelled: STEPS})


def test_parameters_are_those_of_all_optimizers_each_once() -> None:
    shared, separate = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    result = optimization.read_optimization([SGD([shared, separate], 1.0), SGD([shared], 1.0)])
    assert [id(parameter) for parameter in result.parameters] == [id(shared), id(separate)]


@pytest.mark.parametrize(
    ("values", "logged"), [({}, "nothing"), ({"loss": 1.0, "accuracy": 0.5}, "accuracy, loss")]
)
def test_a_value_that_was_not_logged_is_one_line(values: dict[str, float], logged: str) -> None:
    entry = optimization.SchedulerConfig(PLATEAU, monitor="val_loss")
    entry.step(values)  # it waits for a value of its own
    with pytest.raises(errors.UserError) as raised:
        optimization.Optimization([FIRST], [entry]).check_monitored(values)
    problem = f"ReduceLROnPlateau monitors 'val_loss', which was not logged; logged: {logged}"
    assert raised.value.problems == [problem]


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))


def step(module: nn.Module, optimizer: Optimizer, times: int) -> list[Tensor]:
    for index in range(times):
        module(torch.linspace(-1, 1, 8).reshape(2, 4) * (index + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in module.parameters()]


def groups(module: nn.Module, backwards: bool = False) -> list[dict[str, Any]]:
    """Matrices and vectors apart."""
    parameters = list(module.parameters())[:: -1 if backwards else 1]
    return [
        {"params": [weight for weight in parameters if weight.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda groups: SGD(groups, lr=0.05),
    "SGD with momentum": lambda groups: SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda groups: Adam(groups, lr=0.05),
    "Adam with amsgrad": lambda groups: Adam(groups, lr=0.05, amsgrad=True),
    "AdamW": lambda groups: AdamW(groups, lr=0.05, betas=(0.8, 0.95)),
    "AdamW fused": lambda groups: AdamW(groups, lr=0.05, fused=True),
    "Adagrad": lambda groups: Adagrad(groups, lr=0.05),
}


@pytest.mark.parametrize("backwards", [False, True], ids=["same order", "another order"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(kind: str, backwards: bool) -> None:
    module, resumed = make_module(), make_module()
    optimizer = OPTIMIZERS[kind](groups(module))
    step(module, optimizer, 3)
    state = copy.deepcopy(states.optimizer_state(optimizer, states.parameter_names(module)))
    resumed.load_state_dict(module.state_dict())
    other = OPTIMIZERS[kind](groups(resumed, backwards))
    states.load_optimizer_state(other, state, states.parameter_names(resumed))
    expected = step(module, optimizer, 3)
    for tensor, wanted in zip(step(resumed, other, 3), expected, strict=True):
        assert torch.equal(tensor, wanted)


class Decaying(SGD):
    """Divides its rate by its number of steps, which it keeps beside the state of parameters."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.state["all"] = {"steps": self.steps}  # type: ignore[index]
        self.param_groups[0]["lr"] = 1.0 / self.steps
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        super().load_state_dict(state)


def test_what_an_optimizer_keeps_beside_the_state_of_parameters_comes_back() -> None:
    module = make_module()
    optimizer, other = (Decaying(module.parameters(), momentum=0.5) for _ in range(2))
    step(module, optimizer, 3)
    names = states.parameter_names(module)
    states.load_optimizer_state(other, states.optimizer_state(optimizer, names), names)
    assert (other.steps, other.state["all"]) == (3, {"steps": 3})  # type: ignore[index]


def test_parameters_of_one_shape_are_not_mixed_up() -> None:
    """Where shapes tell nothing, only names can."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    names = {id(first): "first", id(second): "second"}
    optimizer = SGD([first, second], lr=1.0, momentum=0.9)
    first.grad, second.grad = torch.full((2,), 1.0), torch.full((2,), 2.0)
    optimizer.step()
    other = SGD([second, first], lr=1.0, momentum=0.9)
    states.load_optimizer_state(other, states.optimizer_state(optimizer, names), names)
    assert other.state[first]["momentum_buffer"].tolist() == [1.0, 1.0]
    assert other.state[second]["momentum_buffer"].tolist() == [2.0, 2.0]


def test_state_is_keyed_by_name_and_keeps_the_groups() -> None:
    module = make_module()
    optimizer = AdamW(groups(module), lr=0.05)
    step(module, optimizer, 1)
    state = states.optimizer_state(optimizer, states.parameter_names(module))
    assert sorted(state["state"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert sorted(state["state"]["0.bias"]) == ["exp_avg", "exp_avg_sq", "step"]
    names = [group["params"] for group in state["param_groups"]]
    assert names == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert [group["lr"] for group in state["param_groups"]] == [0.05, 0.02]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.01]


def test_rates_that_a_scheduler_changed_come_back() -> None:
    module, resumed = make_module(), make_module()
    optimizer = SGD(groups(module), lr=0.05, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=9)
    step(module, optimizer, 1)
    scheduler.step()
    state = states.optimizer_state(optimizer, states.parameter_names(module))
    other = SGD(groups(resumed), lr=0.7)
    states.load_optimizer_state(other, state, states.parameter_names(resumed))
    for group, wanted in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {**group, "params": []} == {**wanted, "params": []}


def test_a_parameter_that_the_module_does_not_own_has_its_index_for_a_name() -> None:
    alone = nn.Parameter(torch.ones(1))
    optimizer = SGD([alone], lr=1.0, momentum=0.9)
    alone.grad = torch.ones(1)
    optimizer.step()
    assert list(states.optimizer_state(optimizer, {})["state"]) == ["#0"]


def test_the_state_of_other_parameters_is_refused() -> None:
    module = make_module()
    names = states.parameter_names(module)
    state = states.optimizer_state(SGD(module.parameters(), lr=1.0), names)
    fewer = SGD(list(module.parameters())[:2], lr=1.0)
    with pytest.raises(errors.ConfigurationError) as raised:
        states.load_optimizer_state(fewer, state, names)
    problem = "the checkpoint's optimizer has other parameters than this one (2.bias, 2.weight)"
    assert raised.value.problems == [problem]


def test_a_save_before_the_first_step_makes_none() -> None:
    """As torch's own functions do, to have a state."""
    module = make_module()
    optimizer, stepped = Adam(module.parameters(), lr=0.1), list[int]()
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    states.optimizer_state(optimizer, states.parameter_names(module))
    assert (stepped, len(optimizer.state)) == ([], 0)


def test_a_parameter_without_gradients_has_no_state_and_kernels_are_this_run_s() -> None:
    module, resumed = make_module(), make_module()
    for model in (module, resumed):
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer, other = Adam(module.parameters(), fused=True), Adam(resumed.parameters())
    step(module, optimizer, 2)
    for model in (module, resumed):
        model[0].weight.requires_grad_(False)  # for the moment
    state = states.optimizer_state(optimizer, states.parameter_names(module))
    states.load_optimizer_state(other, state, states.parameter_names(resumed))
    assert len(other.state) == len(optimizer.state) == 4
    assert other.param_groups[0]["fused"] is None


def test_two_optimizers_of_one_parameter_keep_a_state_each() -> None:
    module = make_module()
    names, keys = states.parameter_names(module), []
    for optimizer in (Adam(module.parameters()), SGD(module.parameters(), lr=0.1, momentum=0.9)):
        step(module, optimizer, 1)
        keys.append(set(states.optimizer_state(optimizer, names)["state"]["0.weight"]))
    assert keys == [{"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}]


def test_groups_that_are_cut_otherwise_are_refused() -> None:
    module = make_module()
    names = states.parameter_names(module)
    state = states.optimizer_state(Adam(module.parameters(), lr=0.5), names)
    other = Adam([{"params": module[index].parameters(), "lr": 0.1} for index in (0, 2)])
    with pytest.raises(errors.ConfigurationError, match="groups its parameters differently"):
        states.load_optimizer_state(other, state, names)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]
