"""The tasks that come with the project: what its own tests/test_tasks.py leaves out."""

import math
import sysconfig
from pathlib import Path

import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from my_project.tasks import digits, text
from my_project.tasks.image_classifier import ImageClassifier
from my_project.tasks.language_model import LanguageModel


@pytest.fixture(scope="module")
def data() -> "digits.Digits":
    return digits.Digits(batch_size=16, shift=1)


@pytest.mark.parametrize("name", ["Digits", "DigitImages"])
def test_digits_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError) as refused:
        getattr(digits, name)()
    assert refused.value.problems == [
        "data: Digits needs scikit-learn, which is not installed; run `pip install scikit-learn`, "
        "or install this project with its extra `examples`"
    ]


def test_only_training_is_augmented(data: "digits.Digits") -> None:
    assert {float(data.plain[0][0].sub(data.plain[0][0]).abs().sum()) for _ in range(9)} == {0.0}
    shifted = {tuple(data.augmented[0][0].flatten().tolist()) for _ in range(60)}
    assert 2 <= len(shifted) <= 9
    assert data.train_dataloader().dataset.dataset is data.augmented
    assert data.val_dataloader().dataset.dataset is data.plain
    assert data.test_dataloader().dataset.dataset is data.plain


def make_model(**options: int) -> "LanguageModel":
    torch.manual_seed(0)
    defaults = {"layers": 2, "heads": 2, "width": 32, "context": 24}
    return LanguageModel(**(defaults | options))


def make_bytes(count: int = 4, length: int = 24) -> Tensor:
    return torch.randint(256, (count, length), generator=torch.Generator().manual_seed(0))


def test_bytes_and_operations_of_a_step_are_what_torch_counts() -> None:
    model, batch = make_model(width=64), make_bytes(3, 25)
    # Torch does not count the operations of fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.training_step(batch, 0).backward()
    assert model.flops_per_sample * 3 == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert model.count_tokens(batch) == 3 * 24


def test_an_earlier_byte_changes_later_logits() -> None:
    model, tokens = make_model().eval(), make_bytes()
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 256
    assert (model(tokens)[:, -1] != model(other)[:, -1]).any()


def test_shorter_sequences_give_the_same_logits() -> None:
    model, tokens = make_model().eval(), make_bytes()
    torch.testing.assert_close(model(tokens[:, :7]), model(tokens)[:, :7])


def test_an_untrained_model_knows_nothing() -> None:
    loss = make_model(context=128).training_step(make_bytes(8, 129), 0)
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_only_matrices_are_decayed_and_the_rate_warms_up() -> None:
    configured = make_model(warmup_steps=4).configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in matrices["params"]} == {2}
    assert {parameter.ndim for parameter in vectors["params"]} == {1}
    assert schedule["interval"] == "step"
    rates = []
    for _ in range(6):
        rates.append(matrices["lr"])
        optimizer.step()
        schedule["scheduler"].step()
    assert rates == pytest.approx([0.00025, 0.0004375, 0.000625, 0.0008125, 0.001, 0.001])


def test_prediction_is_a_byte_for_each_sequence() -> None:
    predicted = make_model().eval().predict_step(make_bytes(4, 25), 0)
    assert predicted.shape == (4,)
    assert predicted.dtype is torch.int64


def test_an_own_folder_is_read_in_order_and_by_pattern(tmp_path: Path) -> None:
    for name, letter in [("b.txt", b"b"), ("a.txt", b"a"), ("c.md", b"c")]:
        (tmp_path / name).write_bytes(letter * 150)
    (tmp_path / "folder.txt").mkdir()
    data = text.TextFiles(str(tmp_path), pattern="*.txt", context=8)
    assert bytes(torch.cat([data.train, data.val, data.test]).tolist()) == b"a" * 150 + b"b" * 150


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 300)
    data = text.TextFiles(str(tmp_path), pattern="*", context=4, max_bytes=400)
    assert bytes(torch.cat([data.train, data.val, data.test]).tolist()) == b"a" * 300 + b"b" * 100


def test_without_a_path_python_s_sources_are_read() -> None:
    data = text.TextFiles(max_bytes=50_000)
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = first.read_bytes()[:200]
    assert bytes(data.train[: len(content)].tolist()) == content
    assert len(data.train) + len(data.val) + len(data.test) == 50_000


@pytest.mark.parametrize("size", [0, 1, 219])
def test_too_little_text_is_one_line(tmp_path: Path, size: int) -> None:
    path = tmp_path / "little.txt"
    path.write_bytes(b"x" * size)
    with pytest.raises(ConfigurationError) as raised:
        text.TextFiles(str(path), context=10)
    assert raised.value.problems == [
        f"data.path={str(path)!r}: {size} bytes are too little for sequences of 10"
    ]


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (16, 3)])
def test_the_classifier_s_shapes(size: int, channels: int) -> None:
    model = ImageClassifier(image_size=size, channels=channels, classes=7, width=4)
    images = torch.rand(5, channels, size, size)
    assert model(images).shape == (5, 7)
    assert model.predict_step((images, torch.zeros(5)), 0).shape == (5,)
