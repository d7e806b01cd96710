"""``python -m <package>``, and the command that bears the project's name."""

import os
import signal
import sys
from types import FrameType

# Variables that torch reads while it is imported.
_IMPORTED = ("TORCH", "PYTORCH", "GLOO", "NCCL")


def main() -> None:
    """Run the command line. Ctrl-C ends it in one line while it is still being imported, too."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _end)
    try:
        from .cli import main as run
    except Exception as error:
        _explain(error)
        raise
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _explain(error: Exception) -> None:
    """End in one line, if what is imported (torch) refuses a variable of its own."""
    text = str(error)
    # The longest first: a short value may be in the text by chance.
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if name.startswith(_IMPORTED) and value and (name in text or value in text):
            reason = text.strip().splitlines()[0][:200].rstrip(".")
            sys.stderr.write(f"error: {name}={value[:100]!r}: {reason}; unset it, or correct it\n")
            sys.exit(2)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
