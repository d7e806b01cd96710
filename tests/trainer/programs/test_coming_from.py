"""The scripts of docs/coming-from: they train here, to the weights that they trained before."""

import dataclasses
import inspect
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from my_project_trainer import Trainer, TrainingModule, callbacks
from my_project_trainer.options import Options
from safetensors.torch import load_file
from tests.project import ROOT, free_port, require, succeed

PAGES = ROOT / "docs" / "coming-from"
PACKAGES = Path(__file__).resolve().parents[3] / "build" / "model-packages"  # of `make models`
NAMES = ("lightning", "accelerate", "torchrun", "transformers")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Appended to a script that runs in a process of its own.
SAVE = """
import safetensors.torch
values = {str(i): each.detach().contiguous() for i, each in enumerate(model.parameters())}
safetensors.torch.save_file(values, "weights.safetensors")
"""
PRETRAIN = """
from transformers import BertTokenizerFast, DistilBertConfig, DistilBertForSequenceClassification
import torch
torch.manual_seed(0)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "very", "good", "bad", "film"]
open("vocab.txt", "w").write(chr(10).join(words))
BertTokenizerFast("vocab.txt").save_pretrained("tiny")
sizes = {"vocab_size": 10, "dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 32}
none = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
DistilBertForSequenceClassification(DistilBertConfig(**sizes, **none)).save_pretrained("tiny")
"""


@pytest.fixture(autouse=True)
def _apart(apart: None) -> Iterator[None]:
    """Each test has a folder of its own, and one thread: small layers are slow with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sides(name: str) -> tuple[str, str]:
    """The script of a page as it was, and as it is here."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", (PAGES / f"{name}.md").read_text(), re.M | re.S)
    lines = diff.splitlines()
    assert {line[0] for line in lines} == {" ", "-", "+"}
    before, after = ("\n".join(line[1:] for line in lines if line[0] != out) for out in "+-")
    return before, after


def in_order(script: str) -> str:
    """A script that reads its samples in their order."""
    script = script.replace("shuffle=True", "shuffle=False")
    script = script.replace('"out",\n', "'out', train_sampling_strategy='sequential',\n")
    return re.sub(r"(= Trainer\(\s*)(?=seed)", r"\1use_distributed_sampler=False, ", script)


def trained(script: str) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Run a script in this process: the parameters of its model, and its metrics."""
    Path("script.py").write_text(script)
    variables = runpy.run_path("script.py", run_name="__main__")
    metrics = variables["trainer"].metrics if "trainer" in variables else {}
    return [parameter.detach() for parameter in variables["model"].parameters()], metrics


def with_packages() -> dict[str, str]:
    """Variables with which a process finds the packages of `make models`, by a folder here."""
    Path("packages").mkdir(exist_ok=True)
    for path in PACKAGES.iterdir():  # torchvision, which others import, may not fit torch
        if not path.name.startswith("torchvision") and not Path("packages", path.name).exists():
            Path("packages", path.name).symlink_to(path)
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path("packages").resolve())])
    return {**OFFLINE, "PYTHONPATH": paths}


def trained_apart(script: str, *packages: str) -> list[torch.Tensor]:
    """Run a script with packages of `make models`: the parameters of its model."""
    missing = [name for name in packages if not (PACKAGES / name).is_dir()]
    require(f"{missing[0]} is not installed: make models" if missing else None)
    Path("script.py").write_text(script)
    succeed(["script.py"], cwd=Path.cwd(), extra=with_packages(), fresh=True)
    weights = load_file("weights.safetensors")
    return [weights[str(index)] for index in range(len(weights))]


def assert_same(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(weights) == len(expected) > 3
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_are_python(name: str) -> None:
    before, after = sides(name)
    for side in (before, after):
        compile(side, name, "exec")
    assert "my_project_trainer" in after
    assert "my_project_trainer" not in before


def test_names_in_the_tables_are_there() -> None:
    known = {field.name for field in dataclasses.fields(Options)} | {"batch_size", "collate_fn"}
    kinds = [getattr(callbacks, name) for name in callbacks.__all__]
    for call in (*kinds, Trainer.test, TrainingModule.log):
        known |= set(inspect.signature(call).parameters)
    keywords = set()
    for name in NAMES:
        rows = re.findall(r"^\| .* \| (.*) \|$", (PAGES / f"{name}.md").read_text(), re.M)
        spans = [code for row in rows for code in re.findall(r"`([^`]*)`", row)]
        keywords |= {keyword for code in spans for keyword in re.findall(r"\b(\w+)=", code)}
        for code in spans:
            if method := re.match(r"(self|trainer)\.(\w+)(?=$|\()", code):
                owner = Trainer if method[1] == "trainer" else TrainingModule
                assert method[2] == "network" or hasattr(owner, method[2]), code
    assert len(keywords) > 20
    assert keywords <= known, keywords - known


@pytest.mark.parametrize(
    ("name", "value", "at_most"),
    # Untrained, it is the logarithm of three classes, 1.1.
    [("lightning", "val_loss", 0.6), ("accelerate", "loss", 0.4), ("torchrun", "loss", 0.3)],
)
def test_a_script_trains(name: str, value: str, at_most: float) -> None:
    _, metrics = trained(sides(name)[1])
    assert 0 < metrics[value] < at_most


def test_a_script_of_torchrun_trains_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = map(in_order, sides("torchrun"))
    ours, _ = trained(after)
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launch | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    theirs, _ = trained(before)
    assert_same(ours, theirs)


@pytest.mark.slow
def test_a_script_of_accelerate_trains_the_same_weights() -> None:
    before, after = map(in_order, sides("accelerate"))
    theirs = trained_apart(before + SAVE, "accelerate")
    assert_same(trained(after)[0], theirs)


@pytest.mark.slow
def test_a_script_of_lightning_trains_the_same_weights() -> None:
    before, after = map(in_order, sides("lightning"))
    theirs = trained_apart(before + SAVE, "lightning")
    assert_same(trained(after)[0], theirs)
    # The weights of its checkpoint, by the code on the page.
    [convert] = re.findall(r"```python\n(.*?)```", (PAGES / "lightning.md").read_text(), re.S)
    [file] = Path("lightning_logs").rglob("*.ckpt")
    Path("convert.py").write_text(convert.replace("FILE.ckpt", str(file)))
    runpy.run_path("convert.py")
    more = after.replace("seed=1,", "seed=1, weights='model.safetensors', max_steps=2,")
    assert_same(trained(more.replace("Classifier()", "Classifier(learning_rate=0.0)"))[0], theirs)


@pytest.mark.slow
def test_a_script_of_transformers_trains_the_same_weights() -> None:
    before, after = (
        in_order(side).replace("distilbert/distilbert-base-uncased", "tiny")
        for side in sides("transformers")
    )
    theirs = trained_apart(PRETRAIN + before + SAVE, "transformers")
    start = load_file("tiny/model.safetensors")
    assert_same(trained_apart(after + SAVE, "transformers"), theirs)
    out = load_file("out/model.safetensors")
    assert out.keys() == start.keys()
    assert any(not torch.equal(out[name], start[name]) for name in out)
