"""The base of all verbs: where they write, progress on a terminal, and checks of output files."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO

from rich.console import Console

from poochplan.errors import PoochError, UsageError
from poochplan.formats.files import check_output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poochplan.online.ranks import Ranks

NARROWEST_TABLE = 100


def rank_and_count() -> tuple[int, int]:
    """This process's rank and the number of ranks, if torchrun or a launcher like it has started several; else 0, 1."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class ShowProgress(Protocol):
    """Shows the progress of the work."""

    def __call__(self, text: str, share: float | None = None, /) -> None:
        """Shows the current activity, and the finished share of the work; None leaves the bar unchanged."""


class Verb(ABC):
    """One verb of the command line. Subclasses define its help and its work.

    With ``--json``, data goes to stdout as JSON, and all other output goes to stderr.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    """Three paragraphs: what it does, its options (see :func:`~poochplan.cli.options.add_options`), and examples."""
    force_help: ClassVar[str] = "overwrite output files that exist"
    has_ranks: ClassVar[bool] = False
    """Whether torchrun may start the verb on several ranks. Rank 0 alone then prints and writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.rank_count = rank_and_count() if self.has_ranks else (0, 1)
        self.console = Console(file=sys.stderr if options.json else sys.stdout, quiet=self.rank > 0)
        if not self.console.is_terminal:  # a log file has no width; tables keep their columns
            self.console.width = max(self.console.width, NARROWEST_TABLE)
        self.exit_code = 0
        """The exit code of a run without an error; ``run`` may change it."""
        self.problem: PoochError | None = None
        """An error to raise after the data was printed."""

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Does the work and returns the data that ``--json`` prints."""

    def execute(self) -> int:
        """Checks the files to write, and runs the verb; returns the exit code. Only ``main`` catches errors."""
        self.check_outputs()
        if self.options.json:
            with data_alone() as stdout:
                data = json.dumps(self.run(), indent=2, allow_nan=False)
                if self.rank == 0:
                    print(data, file=stdout, flush=True)
        else:
            self.run()
        if self.problem is None:
            return self.exit_code
        if self.rank > 0:  # rank 0 tells it
            return self.problem.exit_code
        raise self.problem

    def ranks(self) -> AbstractContextManager[Ranks | None]:
        """A block in which the ranks are one process group; None if this process is alone."""
        if self.rank_count == 1:
            return contextlib.nullcontext()
        from poochplan.online.ranks import launched_ranks

        return launched_ranks()

    def show(self, *renderables: RenderableType) -> None:
        """Prints tables or lines; the terminal wraps long lines."""
        for renderable in renderables:
            self.console.print(renderable, highlight=False, markup=False, soft_wrap=isinstance(renderable, str))

    def given(self, *names: str) -> dict[str, Any]:
        """The options of these names, for a function that has parameters of these names."""
        return {name: getattr(self.options, name) for name in names}

    def write(self, path: Path | None, writer: Callable[..., Path], make: Callable[[], Any]) -> None:
        """Writes what ``make`` returns and says so; nothing without a path, and on ranks above 0."""
        if path is not None and self.rank == 0:
            self.show(f"Wrote {writer(make(), path, force=self.options.force)}")

    def check_outputs(self) -> None:
        """Checks each requested file before the work starts; its option is then a ``Path``."""
        for name, suffix in self.options.outputs.items():
            path = getattr(self.options, name)
            if path is not None and not str(path).endswith(suffix):
                raise UsageError(f"{path}: expected a file name that ends in {suffix}; name one")
            if path is not None:
                setattr(self.options, name, self.output(path))

    def output(self, path: str | Path) -> Path:
        """The path of a file to write, checked before the work starts."""
        return check_output(path, force=self.options.force)

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[ShowProgress]:
        """A progress bar with the current activity on stderr, only on a terminal. It disappears at the end.

        Yields a function that moves it. Before the first share, the bar only shows that the work goes on.
        """
        console = Console(stderr=True)
        if not console.is_terminal or self.rank > 0:
            yield lambda text, share=None: None
            return
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=None)

            def say(text: str, share: float | None = None, /) -> None:
                progress.update(task, description=f"{what}: {text}")
                if share is not None:
                    progress.update(task, total=1.0, completed=share)

            yield say


@contextlib.contextmanager
def data_alone() -> Iterator[TextIO | None]:
    """A block in which output to stdout goes to stderr, also that of C libraries. Yields the real stdout.

    A solver may print on C's stdout, whatever it was told, and so may a workload.
    """
    stdout: TextIO | None = sys.stdout
    if stdout is None:  # closed by the caller; its descriptor may belong to another file by now
        yield None
        return
    stdout.flush()
    kept = os.dup(1)
    data = os.fdopen(kept, "w", encoding=stdout.encoding, closefd=False) if _is_descriptor_1(stdout) else stdout
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield data
    finally:
        stdout.flush()  # for holders of the old stream, such as loggers
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # C buffers output to a pipe
        os.dup2(kept, 1)
        os.close(kept)


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except io.UnsupportedOperation:  # a stream in memory
        return False
