"""A mirror that notes what it is asked to do, and the program of its process: ``python -c PROGRAM ROOT FOLDER``."""

import os
import textwrap
from collections.abc import Sequence

from worker.mirrors.mirror import Run
from worker.mirrors.scalars import Scalars

PROGRAM = textwrap.dedent("""
    import sys
    sys.path.append(sys.argv.pop(1))
    from worker.mirrors import program
    program.PERIOD_S = 0.05
    program._PLACES = {"noting": ("tests.worker.mirrors.noting", "Noting")}
    sys.argv.insert(1, "noting")
    sys.exit(program.main())
""")


class Noting:
    """Writes a line for each call to ``notes`` in the run's folder."""

    url = ""

    def __init__(self, run: Run) -> None:
        self._file = run.folder / "notes"
        self._note("open")

    def log(self, events: Sequence[Scalars]) -> None:
        self._note("log", *(str(step) for _, step, _ in events))

    def finish(self, ending: str) -> None:
        self._note("finish", ending)

    def _note(self, *words: str) -> None:
        with self._file.open("a") as file:
            print(os.getpid(), *words, file=file)
