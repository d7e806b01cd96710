"""The recipes of how-to/hugging-face.md and streaming-data.md, with the packages and no network."""

import json
import os
import re
import tarfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.project import ROOT, require, succeed

from fitting import saved

pytestmark = pytest.mark.slow
PACKAGES = Path(__file__).resolve().parents[3] / "build" / "model-packages"  # of `make models`
CPU = ("--trainer.accelerator", "cpu", "--trainer.loggers", "[csv]")
# Without dropout, whose numbers depend on the number of replicas.
SAVE = """
from transformers import AutoModel, BertConfig, ByT5Tokenizer
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
AutoModel.from_config(BertConfig(vocab_size=384, **sizes, **off)).save_pretrained("tiny")
ByT5Tokenizer().save_pretrained("tiny")
"""
# Counts what ranks exchange by Python; DDP's own all-reduce of gradients is none of these.
LINE = """
import torch.distributed as dist
from torch import nn, optim
from torch.nn.functional import mse_loss
from my_project_trainer import TrainingModule
exchanges = []
for name in ("all_reduce", "all_gather", "broadcast"):
    def noted(*arguments, exchange=getattr(dist, name), **options):
        exchanges.append(exchange.__name__)
        return exchange(*arguments, **options)
    setattr(dist, name, noted)

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        x, y = x.float().view(-1, 1), y.float().view(-1, 1)
        with open(f"exchanges-{self.data_index}.txt", "a") as file:
            file.write(f"{batch_idx} {len(exchanges)}\\n")
        with open(f"seen-{self.data_index}.txt", "a") as file:
            file.writelines(f"{round(value * 1000)}\\n" for value in x.flatten().tolist())
        loss = mse_loss(self.linear(x), y)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.1)
"""

# MosaicML Streaming imports torchvision, of which its local files need nothing.
OPERATORS = f"""import sys
sys.path += [{str(PACKAGES)!r}, {str(Path(__file__).parents[1])!r}]
from real_models.operators import import_torchvision
operators = import_torchvision()
"""
WRITE_MDS = """
import samples
from streaming import MDSWriter
with MDSWriter(out="mds", columns={"x": "float32", "y": "float32"}, size_limit=400) as file:
    for number in range(100):
        file.write({"x": number / 1000, "y": 3 * number / 1000 + 1})
"""


@pytest.fixture
def packages(apart: None) -> None:
    """Write the code of the pages, and link the packages that they need."""
    installed = any(PACKAGES.glob("datasets-*")) and any(PACKAGES.glob("webdataset-*"))
    require(None if installed else "datasets and webdataset are not installed: make models")
    Path("site-packages").mkdir()  # dill pickles modules of other folders by value
    for path in PACKAGES.iterdir():  # transformers imports torchvision, which may not fit torch
        if not path.name.startswith("torchvision"):
            Path("site-packages", path.name).symlink_to(path)
    for page in ("hugging-face", "streaming-data"):
        text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
        for code in re.findall(r"```python\n((?:from|import) .*?)```", text, re.DOTALL):
            [*_, name] = re.findall(r"class (\w+)", code)
            start = OPERATORS if "from streaming" in code else ""
            Path(f"{name.lower()}.py").write_text(start + code)


def python(*words: str) -> None:
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path("site-packages").resolve())])
    extra = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path("hub").resolve()), "PYTHONPATH": paths}
    succeed(words, cwd=Path.cwd(), extra=extra)


def fit(*words: str) -> None:
    python("-m", "my_project", "fit", *words, *CPU)


def test_a_model_of_transformers_on_a_dataset_of_files_equals_one_process(packages: None) -> None:
    Path("films").mkdir()
    for split, rows in (("train", 48), ("test", 16)):
        lines = [f"film {row} was {('bad', 'good')[row % 2]},{row % 2}" for row in range(rows)]
        Path("films", f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    python("-c", SAVE)
    words = ("--model", "reviews.TextClassifier", "--data", "reviews.Reviews")
    words += ("--data.dataset", "films", "--data.num_workers", "1", "--trainer.max_steps", "3")
    words += ("--trainer.global_batch_size", "16", "--model.learning_rate", "0.001")
    words += ("--trainer.limit_val_batches", "1", "--model.pretrained", "tiny")
    words += ("--data.pretrained", "tiny")
    for strategy, devices in (("single_device", "1"), ("ddp", "2"), ("fsdp", "2")):
        where = ("--trainer.devices", devices, "--trainer.strategy", strategy)
        fit(*words, *where, "--trainer.run_name", strategy)
    one = saved("runs/single_device")
    assert len(one) > 30
    for strategy in ("ddp", "fsdp"):
        for name, value in saved(f"runs/{strategy}").items():
            # The bias of keys has no gradient but for roundings, whose sign Adam follows.
            bound = 3.1e-3 if name.endswith("key.bias") else 1e-4
            torch.testing.assert_close(value, one[name], atol=bound, rtol=0, msg=name)


def write_samples(data: str) -> None:
    if data == "samples.Samples":
        python("-c", WRITE_MDS)
        return
    for folder in ("shards", "rows"):
        Path(folder).mkdir()
    for shard in range(4):
        points = [(x / 1000, 3 * x / 1000 + 1) for x in range(25 * shard, 25 * shard + 25)]
        lines = [json.dumps({"x": x, "y": y}) for x, y in points]
        Path("rows", f"{shard}.jsonl").write_text("\n".join(lines))
        with tarfile.open(f"shards/{shard}.tar", "w") as tar:
            for number, point in enumerate(points):
                for name, value in zip(("x.npy", "y.npy"), point, strict=True):
                    content = BytesIO()
                    np.save(content, np.array([value], np.float32))
                    entry = tarfile.TarInfo(f"{number:03}.{name}")
                    entry.size = content.tell()
                    tar.addfile(entry, BytesIO(content.getvalue()))


@pytest.mark.parametrize(
    ("data", "workers", "resumes"),
    [
        ("tars.Tars", 0, True),
        ("tars.Tars", 2, True),
        ("rows.Rows", 0, True),
        ("rows.Rows", 2, False),  # workers draw the order of a buffer again
        ("samples.Samples", None, True),
    ],
)
def test_streamed_samples_are_read_once_and_a_resume_is_exact(data, workers, resumes, packages):
    write_samples(data)
    Path("line.py").write_text(LINE)
    words = ("--model", "line.Line", "--data", data, "--data.batch_size", "8")
    if workers is not None:
        words += ("--data.num_workers", str(workers))
    words += ("--trainer.devices", "2", "--trainer.max_epochs", "2")
    words += ("--trainer.log_every_n_steps", "1", "--trainer.run_name")
    fit(*words, "whole")
    seen = [Path(f"seen-{index}.txt").read_text().split() for index in (0, 1)]
    assert [len(numbers) for numbers in seen] == [100, 100]
    assert sorted(map(int, seen[0] + seen[1])) == sorted([*range(100)] * 2)
    for epoch in (slice(0, 50), slice(50, 100)):
        assert sorted(map(int, seen[0][epoch] + seen[1][epoch])) == [*range(100)]
    assert seen[0][:50] != seen[0][50:]  # another order in each epoch
    if not resumes:
        return
    fit(*words, "cut", "--trainer.max_steps", "10")
    fit(*words, "cut", "--trainer.resume", "auto")
    metrics = [Path("runs", name, "metrics.csv").read_text() for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]
    uninterrupted, cut = saved("runs/whole"), saved("runs/cut")
    assert all(torch.equal(value, cut[name]) for name, value in uninterrupted.items())


@pytest.mark.parametrize("data", ["tars.Tars", "rows.Rows", "samples.Samples"])
def test_ranks_exchange_nothing_per_micro_batch(data: str, packages: None) -> None:
    write_samples(data)
    Path("line.py").write_text(LINE)
    words = ("--model", "line.Line", "--data", data, "--data.batch_size", "1")
    words += ("--trainer.accumulate_grad_batches", "10", "--trainer.devices", "2")
    fit(*words, "--trainer.max_epochs", "1", "--trainer.run_name", "run")
    for index in (0, 1):
        lines = Path(f"exchanges-{index}.txt").read_text().splitlines()
        pairs = [tuple(map(int, line.split())) for line in lines]
        assert [batch for batch, _ in pairs] == [*range(50)]
        # The micro-batches of a step are weighed ahead, and their weights exchanged at once.
        assert all(count == before for (_, before), (batch, count) in pairwise(pairs) if batch % 10)
        steps = pairwise([count for batch, count in pairs if batch % 10 == 9][1:])
        assert all(1 <= later - earlier <= 2 for earlier, later in steps)
