"""Variables that a web process sets for itself before the settings are read; those that are set already stay."""

import os

_WEB = {
    "DJANGO_SETTINGS_MODULE": "webapp.settings",
    # Somebody waits for the answer: it is 503 after two seconds, where a worker would go on waiting for its turn to write.
    "HEADROOM_WRITE_WAIT_S": "2",
    # Its threads are soon asked again.
    "HEADROOM_SQLITE_KEPT_S": "60",
}


def set_for_web() -> None:
    for name, value in _WEB.items():
        os.environ.setdefault(name, value)
