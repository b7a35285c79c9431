"""Exit codes of an attempt's process, and of each of its ranks."""

from typing import Final

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NO_ROOM: Final = 74
"""EX_IOERR: there is no ``result.json``, because the disk is full or fails."""
EXIT_DRAINED: Final = 75
"""EX_TEMPFAIL: stopped as asked, with a checkpoint."""
EXIT_OK: Final = (EXIT_DONE, EXIT_DRAINED)
