"""What a file or a command line says is what the model gets, and what a run records."""

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from my_project_trainer import TrainingModule
from torch import nn

from configuration_subject import CPU, NeedsArgument, mistakes, read, resolved, write

pytestmark = pytest.mark.usefixtures("nothing_runs")
FIT = (*CPU, "--trainer.max_steps=1")


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclass
class Inner:
    rate: float = 0.5
    name: str = "a"


INNER = Inner(rate=0.25)


class Encoder(nn.Module):
    def __init__(self, width: int = 2, activation: str = "none", heads: int = 1) -> None:
        super().__init__()
        self.given = {"width": width, "activation": activation, "heads": heads}


class Broken(nn.Module):
    def __init__(self) -> None:
        raise ValueError("no weights")


class Decoder(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.given = {"width": width}


class Takes(NeedsArgument):
    def __init__(
        self, width: int = 1, free: Any = None, text: str = "1e3", maybe: str | None = None,
        both: int | str = 0, number: float = math.inf, whole: int | None = 3, flag: bool = True,
        listed: list[str] | None = None, bare: list | None = None, options: dict | None = None,
        typed: dict[str, Any] | None = None, nested: dict[str, dict[str, int]] | None = None,
        mode: Mode = Mode.SLOW, path: Path = Path("a/b"), pair: tuple[int, float] = (1, 2.0),
        choice: Literal["007", 1] = 1, fields: Inner = INNER, part: nn.Module | None = None,
        make: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:  # fmt: skip
        super().__init__(width)
        self.given = {name: local for name, local in locals().items() if name != "self"}


class Sets(Takes):
    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("whole", 5)
        super().__init__(**arguments)


@dataclass
class Steps:
    sizes: list[int] = field(default_factory=lambda: [1])
    rate: float = 0.5


@dataclass
class Plan:
    steps: Steps = field(default_factory=Steps)
    sizes: dict[str, int] = field(default_factory=lambda: {"large": 1})


STEPS, FAST, PLAN = Steps([7], rate=0.25), Encoder(9), Plan()


class Lists(NeedsArgument):
    """Has defaults that an option extends."""

    def __init__(
        self, width: int = 1, listed: list[int] = [1], pair: tuple[int, ...] = (1, 2),  # noqa: B006
        fields: Steps = STEPS, part: nn.Module = FAST, options: dict[str, int] = {"a": 1},  # noqa: B006
        plan: Plan = PLAN,
    ) -> None:  # fmt: skip
        super().__init__(width)
        self.given = {name: local for name, local in locals().items() if name != "self"}


class PassesOn(Lists):
    """Has the arguments of its parent, too."""

    def __init__(self, more: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)


def arguments_of(model: TrainingModule) -> Any:
    """The arguments, in a form that can be compared with their types."""
    parts = {"part": getattr(model.given["part"], "given", None), "make": None, "__class__": None}
    return repr(model.given | parts)


def both_ways(tmp_path: Path, *words: str) -> Any:
    """A model's arguments; those of its recorded configuration are the same."""
    work = read("--model", f"{__name__}.Takes", *FIT, *words)
    recorded = write(tmp_path / "recorded.yaml", work.trainer.configuration)
    assert arguments_of(read("--config", recorded).model) == arguments_of(work.model)
    return work.model.given


def in_file(tmp_path: Path, arguments: str | dict[str, Any]) -> tuple[str, str]:
    if isinstance(arguments, dict):
        arguments = yaml.dump(arguments, Dumper=Quoting, default_flow_style=True, sort_keys=False)
    content = f"model:\n  class_path: {__name__}.Takes\n  init_args: {arguments}\n"
    return "--config", str(write(tmp_path / "given.yaml", content))


MARKS = "1e3 0o7 yes Null ~ 1_0 2020-01-01 1:30 .nan +1 = << !x *a &a ${a} ' \" \\ %a @a ` [ } ---"
WORDS = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    [*MARKS.split(), "# x", "1 #x"]
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.recursive(
    WORDS | NUMBERS | st.floats(allow_nan=False) | st.booleans() | st.none(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(WORDS, each, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {
        **{"free": VALUES, "text": WORDS, "maybe": WORDS | st.none(), "both": NUMBERS | WORDS},
        **{"number": st.floats(allow_nan=False), "whole": NUMBERS, "flag": st.booleans()},
        **{"listed": st.lists(WORDS, max_size=3), "bare": st.lists(VALUES, max_size=3)},
        **{"typed": st.dictionaries(WORDS, VALUES, max_size=3)},
    }
)
ANY = settings(max_examples=50, derandomize=True, deadline=None)


class Quoting(yaml.SafeDumper):
    """Quotes all strings, which are strings in YAML 1.1 and 1.2 then."""


Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def test_any_value_of_a_file_is_that_value(tmp_path_factory: pytest.TempPathFactory) -> None:
    @ANY
    @for_all(ARGUMENTS)
    def check(values: dict[str, Any]) -> None:
        folder = tmp_path_factory.mktemp("any")
        arguments = both_ways(folder, *in_file(folder, values))
        assert repr({name: arguments[name] for name in values}) == repr(values)

    check()


def test_any_word_for_a_string_is_that_word(tmp_path_factory: pytest.TempPathFactory) -> None:
    words = WORDS.filter(lambda word: word and word.strip().lower() not in ("null", "~"))

    @ANY
    @for_all(words, words, words.filter(lambda word: not {*word} & {*"\0[]{}$~"}))
    def check(text: str, maybe: str, path: str) -> None:
        options = f"--model.text={text}", f"--model.maybe={maybe}", f"--model.path={path}"
        recorded = both_ways(tmp_path_factory.mktemp("any"), *options)
        assert (recorded["text"], recorded["maybe"], recorded["path"]) == (text, maybe, Path(path))

    check()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("free", "1e-4", 1e-4),
        ("free", "yes", True),
        ("free", "'7'", "7"),
        ("both", "12", 12),
        ("both", "'12'", "12"),
        ("maybe", "null", None),
        ("maybe", "'null'", "null"),
        ("number", "-1e-3", -1e-3),
        ("free", "-.5", -0.5),
        ("number", "3", 3.0),
        ("number", ".inf", math.inf),
        ("whole", "1e3", 1000),
        ("whole", "null", None),
        ("options", "{lr: 1e-4}", {"lr": 1e-4}),
        ("typed", "{lr: 1e-4, b: '1'}", {"lr": 1e-4, "b": "1"}),
        ("bare", "[1e-4, a]", [1e-4, "a"]),
        ("listed", "[1e3, a]", ["1e3", "a"]),
        ("nested", "{a: {x: 1}}", {"a": {"x": 1}}),
        ("mode", "FAST", Mode.FAST),
        ("pair", "[3, 4]", (3, 4.0)),
        ("choice", "'007'", "007"),
        ("flag", "no", False),
        ("flag", "0", False),
        ("free", "1e0", 1.0),
        ("number", "1e3", 1000.0),
        ("fields", "{name: b}", Inner(0.25, "b")),
    ],
)
def test_a_type_reads_text(tmp_path: Path, name: str, text: str, value: Any) -> None:
    by_word = both_ways(tmp_path, f"--model.{name}={text}")[name]
    by_file = both_ways(tmp_path, *in_file(tmp_path, f"{{{name}: {text}}}"))[name]
    assert repr(by_word) == repr(value)
    assert repr(by_file) == repr(value)


def test_options_change_a_part_of_what_a_file_says(tmp_path: Path) -> None:
    class_path = f"{__name__}.Encoder"
    encoder = f"{{class_path: {class_path}, init_args: {{width: 4, activation: relu, heads: 2}}}}"
    file = in_file(tmp_path, f"{{nested: {{a: {{x: 1, y: 2}}, b: {{x: 5}}}}, part: {encoder}}}")
    words = ["--model.nested.a.x=9", "--model.options.k.p", "3", "--model.fields.name=b"]
    arguments = both_ways(tmp_path, *file, *words, "--model.part.width=8", "--model.listed+=a")
    assert arguments["nested"] == {"a": {"x": 9, "y": 2}, "b": {"x": 5}}
    assert (arguments["options"], arguments["listed"]) == ({"k": {"p": 3}}, ["a"])
    assert asdict(arguments["fields"]) == {"rate": 0.25, "name": "b"}
    assert arguments["part"].given == {"width": 8, "activation": "relu", "heads": 2}
    other = both_ways(tmp_path, *file, f"--model.part={__name__}.Decoder")["part"]
    assert other.given == {"width": 4}


def test_a_callable_has_its_arguments(tmp_path: Path) -> None:
    make = "{class_path: torch.optim.AdamW, init_args: {lr: 1e-4}}"
    factory = both_ways(tmp_path, f"--model.make={make}", "--model.make.weight_decay=0.3")["make"]
    made = factory([nn.Parameter(torch.ones(1))])
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (1e-4, 0.3)


def test_a_default_that_a_class_passes_on_stays() -> None:
    work = read("--model", f"{__name__}.Sets", *FIT, "--model.number=2")
    assert (work.model.given["whole"], work.model.given["number"]) == (5, 2.0)
    assert resolved(work)["model"]["init_args"] == {"number": 2}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model.part.hieght=3"], "Option 'hieght' is not accepted"),
        (["--model.part.width=x"], "Parser key \"width\": Expected a <class 'int'>"),
        (["--model.fields.nam=x"], "does not accept option 'nam'"),
    ],
)
def test_what_jsonargparse_says_of_a_part_is_shown(words: list[str], line: str) -> None:
    options = ["--model", f"{__name__}.Takes", f"--model.part={__name__}.Encoder", *FIT]
    (message,) = mistakes(*options, *words)
    assert message.endswith(f"{line})"), message


def test_a_part_that_fails_says_why() -> None:
    (line,) = mistakes("--model", f"{__name__}.Takes", *FIT, f"--model.part={__name__}.Broken")
    assert line.startswith(f"model: Takes(part='{__name__}.Broken') was refused: no weights (")


def test_a_quoted_number_is_no_number_and_members_are_listed(tmp_path: Path) -> None:
    model = "{whole: '7', mode: fast, nested: {a: {x: '1'}}}"
    assert mistakes(*FIT, *in_file(tmp_path, model)) == [
        "model.whole='7': expected int | None",
        "model.mode='fast': expected Mode (FAST, SLOW)",
        "model.nested={'a': {'x': '1'}}: expected dict[str, dict[str, int]] | None",
    ]


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--model.listed+=3"], "listed", [1, 3]),
        (["--model.pair+=3"], "pair", (1, 2, 3)),
        (["--model.fields.sizes+=8"], "fields", Steps([7, 8], 0.25)),
        (["--model.fields.rate=1", "--model.fields.sizes+=8"], "fields", Steps([7, 8], 1.0)),
        (
            [
                "--model.plan.steps.rate=1",
                "--model.plan.sizes.small=7",
                "--model.plan.steps.sizes+=8",
            ],
            "plan",
            Plan(Steps([1, 8], 1.0), {"large": 1, "small": 7}),
        ),
        (["--model.options.b=2"], "options", {"a": 1, "b": 2}),
        (["--model.options.b=2", "--model.options={}"], "options", {}),
        (["--model.options={c: 3}", "--model.options.b=2"], "options", {"c": 3, "b": 2}),
    ],
)
def test_an_option_extends_the_default(tmp_path, words: list[str], name: str, value: Any) -> None:
    model, plan = ("--model", f"{__name__}.Lists"), {"steps": {"rate": 1.0}}
    part = {"init_args": {"fields": {"rate": 1.0}, "plan": plan}}
    file = ("--config", write(tmp_path / "part.yaml", {"model": part}))
    more = [(*model, *words[::-1]), (*file, *model, *words[1:]), (*model, *words[1:], *file)]
    more *= "rate" in words[0]  # in any order, and where a file says it
    for first in ((*model, *words), ("--model", f"{__name__}.PassesOn", *words), *more):
        assert repr(read(*FIT, *first).model.given[name]) == repr(value)


def test_an_option_cannot_extend_a_list_of_an_object() -> None:
    (begun,) = mistakes("--model", "configuration_subject.NeedsArgument", *FIT, "--model.width+=3")
    assert begun == "model.width=[3]: expected int"
    for words in ((), ("--model.part.width=2",)):
        line, *_ = mistakes(*FIT, f"--model={__name__}.Lists", *words, "--model.part.sizes+=2")
        assert line.startswith("sizes+ appends to a list that is not known; before it, name the cl")


def test_a_class_that_passes_arguments_on_keeps_those_of_the_one_that_it_replaces(tmp_path):
    content = {"class_path": f"{__name__}.Lists", "init_args": {"width": 64, "listed": [5]}}
    file = write(tmp_path / "lists.yaml", {"model": content})
    model = read("--config", file, *FIT, f"--model={__name__}.PassesOn", "--model.more=2").model
    assert (model.given["width"], model.given["listed"]) == (64, [5])
