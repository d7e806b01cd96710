"""Has engines reduce gradients in the same order on all ranks."""

from collections.abc import Callable


class FixedOrder:
    """Reduces the gradients of ``count`` parameters, the last parameter first.

    A backward may compute them in another order on each rank: those of an LSTM depend on the
    lengths of its sequences. An engine that reduces each when it is computed would then add up
    gradients of different parameters. Here a gradient waits for those of later parameters.
    """

    def __init__(self, count: int) -> None:
        self._count = self._next = count
        self._ready: dict[int, Callable[[], object]] = {}

    def note(self, index: int, reduce: Callable[[], object]) -> None:
        """Note that the gradient of a parameter can be reduced; reduce those whose turn it is."""
        if index in self._ready or index >= self._next:  # twice, which is for the engine to judge
            reduce()
        self._ready[index] = reduce
        while self._next - 1 in self._ready:
            self._next -= 1
            self._ready.pop(self._next)()

    def finish(self) -> None:
        """Reduce what waits for parameters that this backward did not use."""
        for index in sorted(self._ready, reverse=True):
            self._ready.pop(index)()
        self._next = self._count
