"""The program's own settings in a folder made for this run of the tests, so that none touches a real service's.

pytest-django reads the settings before any conftest.py, so this module is the first place where the folder can be chosen.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# A process that a test starts inherits the folder; it neither makes another nor removes this one. Each of the processes that the
# tests are spread over (pytest-xdist) has its own, though it inherits the name of that of the process that started it.
_PREFIX = "headroom-tests-"
_OWNER = "HEADROOM_TESTS_OWNER"
_owner = os.environ.get("PYTEST_XDIST_WORKER", "")
_is_inherited = Path(os.environ.get("HEADROOM_HOME", "")).name.startswith(_PREFIX) and os.environ.get(_OWNER) == _owner

if not _is_inherited:
    os.environ[_OWNER] = _owner
    os.environ["HEADROOM_HOME"] = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, os.environ["HEADROOM_HOME"], ignore_errors=True)
    for _name in ("DATABASE_URL", "REDIS_URL", "HEADROOM_PRODUCTION", "HEADROOM_URL", "HEADROOM_TOKEN"):
        os.environ.pop(_name, None)

from webapp.settings import *  # noqa: E402, F403

STATIC_ROOT.mkdir(exist_ok=True)  # noqa: F405  (the server of static files warns where its folder is missing)
