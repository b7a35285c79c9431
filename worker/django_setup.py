"""Makes Django's models importable: a program of the worker's own imports this first, for its effect."""

import os

import django
from django.apps import apps

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
# Django's checks load every page of the web; the web's own start runs them
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")
if not apps.ready:
    django.setup()
