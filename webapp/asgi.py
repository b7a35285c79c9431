"""The ASGI application: Django behind a guard that bounds bodies and a line in which bursts of submissions wait.

A few threads serve all event streams, and every other request has one to itself.

The guard stands outside Django because Django spools the whole body to disk before a view or its authentication runs.
"""

import django

from webapp.environment import set_for_web

set_for_web()
django.setup(set_prefix=False)

from webapp.body_guard import BodyGuard  # noqa: E402  (needs the apps that Django has just loaded)
from webapp.http.handler import Handler  # noqa: E402
from webapp.live.threads import ChosenThreads  # noqa: E402
from webapp.submissions import SubmissionLine  # noqa: E402

application = SubmissionLine(BodyGuard(ChosenThreads(Handler())))
