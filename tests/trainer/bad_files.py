"""Bad configuration files, for :mod:`bad_inputs`."""

from tests.project import PACKAGE

DIGITS = 5000
BIG = "9" * DIGITS
_MODEL = f"model: {PACKAGE}.tasks.image_classifier.ImageClassifier\n"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
# Contents, and what the line names beside the file.
FILES: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "no sections"),
    ("a comment alone", "# nothing\n", "no sections"),
    ("a text", "hello", "no sections"),
    ("a number", "5", "no sections"),
    ("a list", "- a\n- b", "no sections"),
    ("null", "null", "no sections"),
    ("an open list", "trainer: [", "not YAML"),
    ("an open brace", "trainer: {", "not YAML"),
    ("an open quote", 'trainer: {run_name: "a', "not YAML"),
    ("a tab", "trainer:\n\tmax_epochs: 1", "not YAML"),
    ("wrong indentation", "trainer:\n  a: 1\n b: 2", "not YAML"),
    ("two documents", "trainer: {}\n---\ntrainer: {}", "not YAML"),
    ("a tag of Python's", "trainer: !!python/object/apply:os.getcwd []", "not YAML"),
    ("an unknown tag", "trainer: !mine {}", "not YAML"),
    ("an alias of nothing", "trainer: *gone", "not YAML"),
    ("an anchor in itself", "trainer: &a {strategy_options: *a}", "nested more than 50"),
    ("a key that is a list", "? [a, b]\n: 1", "not YAML"),
    ("a key that is a dict", "? {a: 1}\n: 1", "not YAML"),
    ("bytes that are no text", b"\xff\xfe\x00trainer", "not YAML"),
    ("a zero byte", b"trainer: \x00", "not YAML"),
    ("UTF-16", "trainer: {}".encode("utf-16"), "not YAML"),
    ("a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not YAML"),
    ("JSON that is cut off", '{"trainer": {"max_epochs": 1', "not YAML"),
    ("Python", "trainer = Trainer(max_epochs=1)", "no sections"),
    ("TOML", "[trainer]\nmax_epochs = 1", "not YAML"),
    ("100,000 brackets", "trainer: " + "[" * 100_000, "nested more than 50"),
    ("100,000 braces", "trainer: " + "{a: " * 25_000, "nested more than 50"),
    ("100 levels", "trainer: " + "[" * 100 + "]" * 100, "nested more than 50"),
    ("100 dashes", "- " * 100 + "x", "nested more than 50"),
    ("a bomb of aliases", BOMB, "expand to more than"),
    ("a number of 5,000 digits", f"trainer: {{seed: {BIG}}}", "cannot be read"),
    ("a date that is none", "trainer: {run_name: 2026-13-45}", "cannot be read"),
    ("larger than a configuration", "#" * 300_000, "larger than"),
    (
        "the trainer twice",
        "trainer: {max_epochs: 1}\ntrainer: {seed: 1}\n",
        "'trainer' is given twice",
    ),
    ("the model twice", _MODEL * 2, "'model' is given twice"),
    ("an option twice", "trainer:\n  seed: 1\n  seed: 2\n", "'seed' is given twice"),
    ("an option twice, in braces", "trainer: {seed: 1, seed: 2}", "'seed' is given twice"),
    (
        "an argument twice",
        "model:\n  class_path: a.B\n  init_args: {width: 1, width: 2}\n",
        "'width' is given twice",
    ),
    (
        "an option of a strategy twice",
        "trainer: {strategy_options: {a: 1, a: 1}}",
        "'a' is given twice",
    ),
]
# Sections, and what each of the lines that refuse them begins with.
SECTIONS: list[tuple[str, str, tuple[str, ...]]] = [
    *(
        (f"trainer: {value}", f"trainer: {value}\n{_MODEL}", ("trainer:",))
        for value in ("5", "[a]", "[]", "text", "true", "1.5", "", "null", "~", "2026-01-01")
    ),
    *(
        (f"an unknown section {name}", f"{name}:{value}\n{_MODEL}", (f"{name}:",))
        for name in ("trianer", "optimizer", "Model", "callbacks", "fit", "config", "seed", "lr")
        for value in ("", " {}", " 5", " [a]")
    ),
    *(
        (f"model: {value}", f"model: {value}\n", ("model",))
        for value in ("5", "[a]", "{}", "{a: 1}", "true", "", "a", "a.b", ".a", "a.", "math.floor")
    ),
    *(
        (f"data: {value}", f"{_MODEL}data: {value}\n", ("data",))
        for value in ("5", "[a]", "{}", "{a: 1}", "true", "a", "a.b", ".a", "os.path", "0", "[]")
    ),
    *(
        (
            f"model.init_args: {value}",
            f"model:\n  class_path: {PACKAGE}.tasks.image_classifier.ImageClassifier\n"
            f"  init_args: {value}\n",
            ("model.",),
        )
        for value in ("5", "[1]", "text", "{widht: 3}", "{width: x}", "{width: null}", "{1: 2}")
    ),
    (
        "keys that are no text",
        f"7: 2\n2.5: x\ntrue: y\nnull: z\n{_MODEL}",
        ("7:", "2.5:", "True:", "None:"),
    ),
    (
        "several options",
        f"trainer: {{max_epoch: 1, seed: x, devices: [1, 1], strategy: dpd}}\n{_MODEL}",
        ("trainer.max_epoch:", "trainer.seed=", "devices=", "strategy="),
    ),
]
