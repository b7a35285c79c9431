"""The machine as the first worker of a run measured it, for the workers of other tests: to measure takes all of a processor for
ten seconds, and nothing changes from test to test. A worker finds it where it keeps what it has measured itself.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

FOLDER_VARIABLE = "HEADROOM_TESTS_MACHINES"
"""Names the folder that all processes of a run share (``tests/conftest.py``)."""


def give_measured_machines(home: Path) -> None:
    """Put what was measured into a HEADROOM_HOME that no worker has started on."""
    (home / "cache").mkdir(exist_ok=True)
    for file in _shared_folder().glob("machine-*.json"):
        shutil.copyfile(file, home / "cache" / file.name)


def keep_measured_machines(home: Path) -> None:
    """Take what a worker has measured on a HEADROOM_HOME."""
    _shared_folder().mkdir(exist_ok=True)
    for file in home.glob("cache/machine-*.json"):
        staged = _shared_folder() / f".{file.name}-{os.getpid()}"
        shutil.copyfile(file, staged)
        staged.replace(_shared_folder() / file.name)


@functools.cache
def _shared_folder() -> Path:
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    folder = Path(tempfile.mkdtemp(prefix="headroom-machines-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
