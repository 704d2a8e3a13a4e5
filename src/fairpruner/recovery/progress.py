"""The progress bar of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fairpruner.recovery.history import Tally
from fairpruner.terminal.progress import batch_bar

ShowProgress = Callable[[int, int, Tally], None]  # (epoch from 0, batches of it done, their tally)


@contextmanager
def training_bar(epochs: int, steps: int | None, *, quiet: bool) -> Iterator[ShowProgress]:
    """A bar with loss, accuracy and time left; call the yielded function after each batch."""
    calls = 0
    with batch_bar(steps and steps * epochs, quiet=quiet) as show_batches:

        def show(epoch: int, position: int, tally: Tally) -> None:
            nonlocal calls
            calls += 1
            done = epoch * steps + position if steps else calls
            show_batches(f"recovering, epoch {epoch + 1} of {epochs}", done, str(tally))

        yield show
