"""A compiled module, or each of its blocks, computes what it computes uncompiled."""

import contextlib
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.loop import compilation
from tests.conformance.rows import ROUNDING
from tests.project import succeed
from torch import Tensor, nn
from torch.nn import functional

import checkpointed_subject
from checkpointed_subject import FEATURES, Model
from fitting import quiet

# --- with a backend that needs no compiler --------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile has captured, which are computed by torch's eager kernels."""
    captured: list[Any] = []
    make = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def compiled(model: Any, **options: Any) -> Any:
        assert options.pop("mode", None) in (None, *compilation.MODES)
        return make(model, backend=backend, **options)

    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "check_compiler", lambda _: None)
    monkeypatch.setattr(torch, "compile", compiled)
    return captured


class Block(checkpointed_subject.Block):
    """Counts in its buffer alone."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls += 1
        return x + scale * self.second(self.dropout(self.norm(self.first(x))).tanh())


class Network(nn.Module):
    """Blocks, one of them called twice, and other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(0.2), Block()])
        self.head = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_ones(1) / 2
        for layer in (*self.layers, self.layers[0]):
            x = layer(x, scale=scale)
        return self.head(x)


def computed(value: Any, names: list[str]) -> dict[str, Tensor]:
    """Gradients and buffers after three batches, and the next random number."""
    torch.manual_seed(0)
    network = Network()
    with compilation.applied(network, value, names):
        for batch in torch.randn(3, 6, FEATURES):
            network(batch).square().mean().backward()
    assert all("forward" not in vars(module) for module in network.modules())
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {**gradients, **dict(network.named_buffers()), "random": torch.rand(1)}


WAYS = [  # the first two are quick
    ({"regional": True}, [], 2),  # one block has another momentum
    (True, ["Block"], 2),
    (True, [], 1),
    ({"regional": ["head"], "dynamic": False}, [], 1),
    ({"regional": ["Block", "layers.*.norm"]}, [], 2),  # one inside the other
    (True, ["Block", "layers.*.norm"], 2),  # the norms alone
    ({"regional": True}, ["layers.1"], 1),
    ({"regional": True, "mode": "max-autotune"}, ["layers.1", "head"], 2),
]


@pytest.mark.parametrize(
    ("value", "names", "count"),
    [pytest.param(*way, marks=[pytest.mark.slow] * (way not in WAYS[:2])) for way in WAYS],
)
def test_gradients_and_buffers_are_equal(graphs, value, names, count):
    alone = computed(False, [])
    assert graphs == []
    values = computed(value, names)
    assert len(graphs) >= count
    assert all(float((eager - values[key]).abs().max()) < ROUNDING for key, eager in alone.items())


class Plain(nn.Module):
    """A block whose copies differ in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


@pytest.mark.parametrize("names", [[], ["Plain"]])
def test_a_block_is_compiled_once_for_all_of_its_class(graphs, names):
    blocks = nn.Sequential(*(Plain() for _ in range(12)))
    network = nn.Sequential(nn.Linear(FEATURES, FEATURES), blocks)
    with compilation.applied(network, {"regional": True}, names):
        for _ in range(2):
            network(torch.randn(2, FEATURES)).sum().backward()
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("value", "names"),
    [({"mode": "default"}, []), ({"regional": True}, []), (True, ["Plain"]), (False, ["Plain"])],
)
def test_a_fit_compiles_for_as_long_as_it_lasts(graphs, tmp_path, value, names):
    class Called(Model):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(Plain(), Plain())

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0]).square().mean()

    module = Called()
    options = {"accelerator": "cpu", "max_steps": 2, "default_root_dir": tmp_path}
    asked = trainer.Trainer(**options, compile=value, activation_checkpointing=names)
    asked.fit(module, module.train_dataloader())
    count = len(graphs)
    assert (count > 0) is (value is not False)
    module(torch.randn(7, FEATURES)).sum().backward()
    assert len(graphs) == count


class Calls(Model):
    """Its step calls the whole module, a module in it, one of two, or a method."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.losses = how, list[float]()
        self.network = nn.Sequential(Plain(), Plain())
        self.network.encode = self.network.forward  # type: ignore[assignment]
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        if self.how == "self":
            output = self(x)
        elif self.how == "modules":
            output = self.head(self.network(x))
        elif self.how == "one":
            output = self.head(self.network[1](self.network[0](x)))
        else:
            output = functional.linear(self.network[0](x), self.head.weight)
        loss = output.square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])  # compiled for validation, which does not count


def fitted(folder: Path, how: str, value: Any, **options: Any) -> Calls:
    torch.manual_seed(0)
    module = Calls(how)
    quiet(max_steps=3, default_root_dir=folder, compile=value, **options).fit(module)
    return module


class Many(Model):
    """More modules of one class than torch compiles a function for, each of another size."""

    def __init__(self) -> None:
        super().__init__()
        sizes = range(FEATURES, FEATURES + 12)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(n, n + 1)) for n in sizes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.parts:
            x = block(x)
        return x.square().mean()


def test_each_micro_batch_begins_a_step_of_cuda_graphs(graphs, tmp_path, monkeypatch):
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    for value, count in ((False, 0), ({"mode": "reduce-overhead"}, 6)):
        fitted(tmp_path / str(count), "self", value, **options)
        assert len(marks) == count


def test_all_modules_of_a_class_are_compiled(graphs, tmp_path):
    limit = torch.compiler.config.recompile_limit
    options = {"accelerator": "cpu", "max_steps": 1, "default_root_dir": tmp_path}
    trainer.Trainer(**options, compile=True, limit_val_batches=0).fit(Many())
    assert (len(graphs), torch.compiler.config.recompile_limit) == (12, limit)


@pytest.mark.parametrize(
    ("how", "value", "count"),
    [
        ("self", True, 1),  # and all in it
        ("modules", True, 2),
        ("modules", {"mode": "max-autotune"}, 2),
        ("modules", {"dynamic": False}, 2),
        ("modules", {"regional": ["Plain"]}, 2),  # the input of one requires no gradient
        ("method", {"regional": True}, 1),
    ],
)
def test_what_a_step_calls_is_compiled(graphs, tmp_path, how, value, count):
    alone = fitted(tmp_path / "alone", how, False, limit_val_batches=0)
    assert graphs == []
    compiled = fitted(tmp_path / "compiled", how, value, limit_val_batches=0)
    assert len(graphs) == count
    assert compiled.losses == pytest.approx(alone.losses, abs=ROUNDING)
    again = fitted(tmp_path / "again", how, value, limit_val_batches=0)
    assert len(graphs) == 2 * count  # each fit compiles
    assert again.losses == compiled.losses


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_that_has_compiled_itself_is_named(graphs, tmp_path, in_place):
    class Compiles(Calls):
        def __init__(self):
            super().__init__("self")
            self.net = nn.Sequential(nn.Linear(FEATURES, 4))
            if in_place:
                self.net.compile()
            else:
                self.net = torch.compile(self.net)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

    options = {"accelerator": "cpu", "max_steps": 1, "default_root_dir": tmp_path}
    made = trainer.Trainer(**options, compile=True, limit_val_batches=0, loggers=[])
    with pytest.raises(trainer.UserError, match=r"^compile: net is compiled already, by its own"):
        made.fit(Compiles())


def test_a_step_of_which_nothing_is_compiled_is_an_error(graphs, tmp_path):
    with pytest.raises(trainer.UserError) as raised:
        fitted(tmp_path / "method", "method", True)
    assert graphs  # in the validation before
    assert raised.value.problems == [
        "compile: nothing is compiled, because training_step calls neither self(...) nor a whole "
        "module of network, head, but methods or layers; name what it calls, as in "
        "--trainer.compile '{regional: [Block]}', or leave compile out"
    ]
    said = pytest.raises(trainer.UserError, match="unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DIS")
    with torch._dynamo.config.patch(disable=True), said:
        fitted(tmp_path / "disabled", "modules", True)


def test_a_note_names_what_is_not_compiled(graphs, capfd, tmp_path):
    line = "note: compile: network: not called as a whole in the first step; what the step calls of"
    fitted(tmp_path / "one", "one", True)
    assert line in capfd.readouterr().err
    fitted(tmp_path / "modules", "modules", True)
    fitted(tmp_path / "self", "self", True)
    assert "note: compile" not in capfd.readouterr().err


def problems(value: Any) -> list[str]:
    """What the trainer, and then a fit, say of a value."""
    with contextlib.suppress(ConfigurationError):
        made = trainer.Trainer(accelerator="cpu", max_steps=1, devices=2, compile=value)
        with pytest.raises(ConfigurationError) as raised:
            made.fit(Model())
        return raised.value.problems
    with pytest.raises(ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", max_steps=1, compile=value)
    return raised.value.problems


NAMES = "give true, or a list of names, for example ['Block']"


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({}, ["={}: give true, or options"]),
        ({"mod": "default"}, [" has no option 'mod'; did you mean 'mode'?"]),
        (
            {"mode": "max-autotun", "dynamic": 2},
            [
                ".mode='max-autotun' is unknown; did you mean 'max-autotune'?",
                ".dynamic=2: give true, false or null",
            ],
        ),
        ({"regional": "Block"}, [f".regional='Block': {NAMES}"]),
        ({"regional": []}, [f".regional=[]: {NAMES}"]),
        (
            {"regional": ["Blok"]},
            [".regional: nothing in the model is named 'Blok'; did you mean 'Block'?"],
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(monkeypatch, value, lines):
    # A machine without a compiler has more problems.
    monkeypatch.setattr(compilation, "check_compiler", lambda _: None)
    assert problems(value) == [f"compile{line}" for line in lines]


def test_a_model_without_repeated_blocks_is_refused():
    with pytest.raises(ConfigurationError, match="the model has no repeated blocks"):
        compilation.select(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"regional": True}, [])
    blocks = compilation.select(Network(), {"regional": True}, [])
    assert list(blocks) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_stays_as_it_is():
    module = nn.ModuleDict({"scripted": torch.jit.script(nn.Linear(2, 2)), "own": Plain()})
    assert list(compilation.select(module, True, [])) == ["own"]


SLOW_COMPILE = """
import sys, time, torch, my_project_trainer as trainer
from my_project_trainer.loop import compilation
make, seconds = torch.compile, float(sys.argv[2])
compilation.check_compiler = lambda _: None

class Model(trainer.TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def backend(graph, inputs):
    time.sleep(seconds * torch.distributed.get_rank())
    return graph
torch.compile = lambda model, **_: make(model, backend=backend)
options = {"timeout_seconds": seconds / 4}
run = trainer.Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], strategy_options=options,
    compile=True, max_steps=2, loggers=[], enable_progress_bar=False)
run.fit(Model(), list(torch.ones(4, 2, 4)))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_wait_for_one_whose_compile_takes_longer_than_a_collective_may(tmp_path, strategy):
    script = tmp_path / "slow.py"
    script.write_text(SLOW_COMPILE)
    succeed([script, strategy, "60"], cwd=tmp_path, fresh=True)


def test_without_a_compiler_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: str(tmp_path))
    lines = [
        "compile needs a C++ compiler: install g++, or name one in CXX",
        "compile needs the headers of Python: install python3-dev",
    ]
    assert problems(True) == problems({"mode": "default"}) == lines
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", "true")
    compilation.check_compiler(True)
