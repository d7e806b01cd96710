"""Entry point of ``python -m <package>`` and of the console script."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

_IMPORTED = ("TORCH", "PYTORCH", "GLOO", "NCCL")  # variables that torch reads at import


def main() -> None:
    """Run the command line. Ctrl-C prints one line, even during the imports."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        Path.cwd()
    except FileNotFoundError:  # for which MKL blames a library of torch
        sys.stderr.write("error: the working directory was removed; change to one that exists\n")
        sys.exit(2)
    try:
        from my_project_trainer.cli import main as run
    except Exception as error:
        _explain(error)
        raise
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _explain(error: Exception) -> None:
    """Print one line if torch fails at import because of an environment variable."""
    text = str(error)
    # Longest first: a short value may occur in the text by chance.
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if name.startswith(_IMPORTED) and value and (name in text or value in text):
            reason = text.strip().splitlines()[0][:200].rstrip(".")
            sys.stderr.write(f"error: {name}={value[:100]!r}: {reason}; unset it, or correct it\n")
            sys.exit(2)


def interrupt(number: int, frame: FrameType | None) -> None:
    """End at once, with one line."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
