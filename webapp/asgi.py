"""The ASGI application: Django behind a guard that bounds bodies and a line in which bursts of submissions wait.

A few threads serve all event streams.

The guard stands outside Django because Django spools the whole body to disk before a view or its authentication runs.
"""

import os
from typing import cast

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
# Somebody waits for the answer: it is 503 after two seconds, where a worker would go on waiting for its turn to write.
os.environ.setdefault("HEADROOM_WRITE_WAIT_S", "2")
_django = get_asgi_application()

from webapp.body_guard import Application, BodyGuard  # noqa: E402  (needs the apps that Django has just loaded)
from webapp.live.threads import SharedThreads  # noqa: E402
from webapp.submissions import SubmissionLine  # noqa: E402

application = SubmissionLine(BodyGuard(SharedThreads(cast(Application, _django))))
