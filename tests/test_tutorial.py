"""The script that follows the tutorial notices what a reader would. `make tutorial` follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tutorial
from rendering import TEMPLATE

PAGE = """# A tutorial

Save it as `new.txt`:

```yaml
a: 1
```

```
cat new.txt
a=2 && mkdir below && cd below
```

```text
a: 1
```

## Elsewhere

<!-- tutorial: docker -->

```
false
```

## Here again

This reads its input, and is the shell of before:

```
cat
echo "$a in $(basename "$PWD")" >&2
```

```text
2 in below
```

Save both as `here.txt`:

```text
b
```

```
cat here.txt
```
"""


def followed(folder: Path, text: str = PAGE, *stages: str) -> int:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return tutorial.follow(page, folder, stages or ("local",))


def test_a_page_is_followed_in_order(tmp_path: Path) -> None:
    assert followed(tmp_path) == 2
    assert (tmp_path / "below" / "here.txt").read_text(encoding="utf-8") == "b\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("cat here.txt", "cat hre.txt", 45, "a command has failed, .*No such file"),
        ("2 in below", "3 in below", 35, "the page shows\n\n3 in below\n.* printed:\n\n2 in below"),
        ("a: 1\n```\n\n##", "a: 1\nb: 1\n```\n\n##", 14, "the page shows\n\na: 1\nb: 1\n"),
        ("2 in below\n```", "```", 35, "2 in below"),
        ("mkdir below && cd below", "mkdir below | false | true", 9, "a command has failed"),
        ("<!-- tutorial: docker -->", "", 22, "a command has failed"),
    ],
)
def test_what_is_wrong_is_an_error(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert PAGE.count(old) == 1
    with pytest.raises(tutorial.TutorialError, match=rf"(?s)page\.md:{line}: .*{says}"):
        followed(tmp_path, PAGE.replace(old, new))


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("…\nb\n", "a\na\nb\n"),
        ("a\n…\n", "a\n"),
        ("step-… of …\n", "step-12 of 600\n"),
        ("loss 0.1000  9 samples/s  0:00:00 left\n", "loss 0.1019  1 samples/s  1:20:33 left\n"),
        ("Submitted batch job 3\nslurm-3.out\n", "Submitted batch job 71\nslurm-72.out\n"),
    ],
)
def test_what_varies_may_differ(shown: str, printed: str) -> None:
    assert tutorial.differs(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\nb\n", "a\n"),
        ("…\nb\n", "a\n"),
        ("a\n…\nc\n", "a\nb\n"),
        ("loss 0.1000\n", "loss 0.1021\n"),
        ("loss 0.1000\n", "loss nan\n"),
        ("step 600, 9 samples/s\n", "step 601, 9 samples/s\n"),
        ("my-project:0.1.0\n", "my-project:0.1.1\n"),
    ],
)
def test_what_does_not_vary_is_compared(shown: str, printed: str) -> None:
    assert tutorial.differs(shown, printed) is not None


def test_each_stage_of_the_tutorial_is_followed_somewhere() -> None:
    page = (TEMPLATE / "docs" / "tutorial.md").read_text(encoding="utf-8")
    blocks = list(tutorial.blocks(page))
    stages = ["setup", "files", "local", "docker", "slurm"]
    assert list(dict.fromkeys(block.stage for block in blocks)) == stages
    assert [block.path for block in blocks if block.path] == [
        "src/my_project/tasks/houses.py",
        "configs/houses.yaml",
        "sweeps/houses.yaml",
        "predict.py",
    ]
    outputs = [block for block in blocks if block.language == "text" and not block.path]
    commands = [block for block in blocks if not block.language]
    assert len(outputs) == len(commands) >= 8  # each step shows what is printed
    assert {block.language for block in blocks} == {"", "text", "python", "yaml"}
    lines = [line for block in outputs for line in block.text.splitlines()]
    assert len([line for line in lines if line != "…"]) > 25
