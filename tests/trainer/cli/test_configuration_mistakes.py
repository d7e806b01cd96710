"""Each mistake in a configuration is one line, and all are reported together."""

import re
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer import DataModule
from my_project_trainer.options import class_paths

from configuration_subject import CPU, DIGITS, TASKS, mistakes, write

pytestmark = pytest.mark.usefixtures("nothing_runs")


NOPE = f"{TASKS}.image_classifier.Nope"
OPTION = "there is no such option; did you mean"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--trainer.max_epoch 3", f"trainer.max_epoch: {OPTION} 'max_epochs' or 'max_steps'?"),
        ("--config", "--config: no value is given; name a YAML file"),
        ("--model.widht 3", f"model.widht: {OPTION} 'width'?"),
        ("--trainer.max_epochs three", "trainer.max_epochs='three': expected int >= 1 | None"),
        (
            "--trainer.max_epochs null",
            "give max_epochs, max_steps or max_time: training would not end",
        ),
        ("--trainer.strategy dpd", "strategy='dpd' is unknown; did you mean 'dp' or 'ddp'?"),
        (
            "--trainer.strategy=ddp --trainer.strategy_options.bucket_cap=3",
            "strategy_options: ddp has no option 'bucket_cap'; did you mean 'bucket_cap_mb'?",
        ),
        (
            "--trainer.strategy=ddp --trainer.strategy_options.timeout_seconds=.nan",
            "strategy_options.timeout_seconds=nan: expected a finite number",
        ),
        (
            "--trainer.devices 3",
            "global_batch_size=64 is not divisible by 3 replicas times "
            "accumulate_grad_batches=1; the nearest divisible sizes are 63 and 66",
        ),
        (
            "--trainer.resume auto",
            "resume='auto' needs run_name, the run to look for: add --trainer.run_name NAME, or "
            "set resume to a run directory",
        ),
        (
            "--trainer.gradient_clip_algorithm nrm",
            "trainer.gradient_clip_algorithm='nrm': expected Literal['norm', 'value']",
        ),
        (
            f"--model {NOPE}",
            f"model.class_path='{NOPE}': module '{TASKS}.image_classifier' has no attribute 'Nope'",
        ),
        (
            f"--model {TASKS}.digits.Digits",
            f"model.class_path='{TASKS}.digits.Digits' is not a TrainingModule",
        ),
        ("--model configuration_subject.FailsByItself", "model: this one never works"),
        ("--optimizer.lr 3", "optimizer: there is no such section; known: data, model, trainer"),
        ("--trianer.lr 3", "trianer: there is no such section; did you mean 'trainer'?"),
        ("fast", "'fast' is not an option; options begin with --"),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str) -> None:
    assert mistakes(*DIGITS, *CPU, *words.split()) == [line]


def test_an_argument_that_is_required_and_missing() -> None:
    name = "configuration_subject.NeedsArgument"
    line = "model.width: not given, and it has no default"
    assert mistakes("--trainer.max_steps", "1", "--model", name) == [line]


def test_an_argument_that_is_passed_on_to_a_parent_class() -> None:
    name = "configuration_subject.PassesOn"
    assert mistakes("--model", name, "--model.widht=3", "--model.depth=x", "--trainer.seed=x") == [
        "model.widht: there is no such option; did you mean 'width'?",
        "model.depth='x': expected int",
        "trainer.seed='x': expected int >= 0",
    ]


def test_a_class_with_any_keywords_is_given_all() -> None:
    entry = {"class_path": "configuration_subject.TakesAnything", "init_args": {"size": 2, "a": 3}}
    made: Any = class_paths.create("callbacks[0]", entry, DataModule, {})
    assert (made.size, made.options) == (2, {"a": 3})


def test_no_model_at_all() -> None:
    line = "model: not given; name its class in a config file or by --model CLASS"
    assert mistakes("--trainer.max_epochs", "1") == [line]


def test_a_checkpoint_that_is_not_there() -> None:
    line = "checkpoint='gone': no such directory; give a run directory or a checkpoint"
    assert mistakes(*DIGITS, "--checkpoint", "gone", command="test") == [line]
    assert mistakes("--checkpoint", "gone", "--trainer.seed", "x", command="test") == [
        "checkpoint='gone': no such directory; give a run directory or a checkpoint",
        "trainer.seed='x': expected int >= 0",
    ]


def test_an_import_that_fails_names_the_line_that_raised(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "has_error.py").write_text("def fail():\n    {}['x']\n\nfail()\n")
    (tmp_path / "imports_it.py").write_text("import torch\nimport has_error\n")
    (tmp_path / "lacks_one.py").write_text("import not_installed_here\n")
    names = ["--model", "imports_it.M", "--trainer.strategy", "has_error.S"]
    place = f"KeyError: 'x' ({tmp_path / 'has_error.py'}, line 4)"
    lacking = f"No module named 'not_installed_here' ({tmp_path / 'lacks_one.py'}, line 1)"
    assert mistakes(*names, "--trainer.callbacks", "[lacks_one.C, nowhere_at_all.C]") == [
        f"model.class_path='imports_it.M': {place}",
        f"strategy='has_error.S': {place}",
        f"callbacks[0]='lacks_one.C': {lacking}",
        "callbacks[1]='nowhere_at_all.C': No module named 'nowhere_at_all'",
    ]


def test_yaml_cannot_make_python_objects(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = write(tmp_path / "c.yaml", f"trainer: !!python/object/apply:os.mkdir [{canary}]")
    (line,) = mistakes("--config", path)
    assert line.startswith(f"--config {path}: not YAML (could not determine a constructor")
    assert not canary.exists()


def test_mistakes_in_every_part_are_reported_together() -> None:
    words = "--trainer.max_epoch 3 --trainer.log_every_n_steps often --trainer.strategy dpd"
    words += " --trainer.devices 1,1 --trainer.seed -1 --model.widht 3 --model.dropout much"
    lines = mistakes(*DIGITS, *CPU, *words.split(), "--data.batch_size=x", "--optimizer.lr=1")
    assert sorted(re.split("[:=]", line)[0] for line in lines) == [
        "data.batch_size", "devices", "model.dropout", "model.widht", "optimizer", "strategy",
        "trainer.log_every_n_steps", "trainer.max_epoch", "trainer.seed",
    ]  # fmt: skip


def test_mistakes_that_only_making_finds_are_reported_together() -> None:
    lines = mistakes(
        *CPU,
        *("--trainer.limit_val_batches", "2.5", "--trainer.precision", "8"),
        *("--model", "configuration_subject.FailsByItself"),
        *("--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"),
    )
    assert len(lines) == 4


def test_a_misspelt_option_does_not_hide_missing_data() -> None:
    lines = mistakes(
        *(*DIGITS, *CPU, "--trainer.max_epoch", "3"),
        *("--data", f"{TASKS}.text.TextFiles", "--data.path", "/gone"),
    )
    assert len(lines) == 2
