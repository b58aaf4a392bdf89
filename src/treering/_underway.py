"""The saves of one run that are under way, or are over and nobody has been told how they ended."""

import contextlib
from collections.abc import Iterator

from ._pending import PendingSave


class UnderWay:
    """Saves in the order of the calls, in which they end as well; of a failed one the run's next call tells."""

    def __init__(self) -> None:
        self._saves: list[PendingSave] = []
        self._writing: list[object] = []  # calls that may be about to add one, or change the run themselves

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Whoever changes the run does it within this block."""
        call = object()
        try:
            self._writing.append(call)
            yield
        finally:
            with contextlib.suppress(ValueError):  # an interrupt came first
                self._writing.remove(call)

    def busy(self) -> bool:
        """Whether the run is being changed, or about to be."""
        return bool(self._writing) or self.over() < len(self)

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, pending: PendingSave) -> None:
        """A save begins."""
        self._saves.append(pending)

    def over(self) -> int:
        """How many of them are over."""
        return sum(pending.done() for pending in self._saves)

    def any_failed(self, over: int) -> bool:
        """Whether one of the first so many has failed."""
        return any(pending.failed for pending in self._saves[:over])

    def steps(self, over: int) -> set[int | None]:
        """The steps of all but the first so many."""
        return {pending.step for pending in self._saves[over:]}

    def last(self) -> PendingSave:
        """The one that ends last."""
        return self._saves[-1]

    def settle(self, over: int) -> None:
        """Waits for the first so many and forgets them; raises what the first of them that failed did."""
        for pending in self._saves[:over]:
            pending._wait()  # an interrupt here forgets none of them
        ended, self._saves = self._saves[:over], self._saves[over:]
        for n, pending in enumerate(ended):
            if pending.failed:
                self._saves = ended[n + 1 :] + self._saves
                pending.result()
