"""``python -m <package>``, and the command that bears the project's name."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. Ctrl-C ends it in one line while it is still being imported, too."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _end)
    from .cli import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
