"""Files of the pages under names that hold their content's hash, compressed when they are collected.

Such a name never has other content, so that browsers keep the file for a year and ask no more. Modules name one another by
these names as well, or a page would load two copies of each.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brotli
from asgiref.sync import iscoroutinefunction
from django.contrib.staticfiles.apps import StaticFilesConfig
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware
from servestatic.compress import Compressor
from servestatic.middleware import ServeStaticMiddleware
from servestatic.storage import CompressedManifestStaticFilesStorage


class CollectedFiles(StaticFilesConfig):
    """Leaves out what no page loads: htmx's extensions, one of which imports a module that is not beside it, its other
    versions, and django-ninja's second documentation program."""

    ignore_patterns = [*StaticFilesConfig.ignore_patterns, "ext", "htm?x-4*", "htmx-2.js", "swagger-ui*", "*.md"]


class QuickCompressor(Compressor):  # type: ignore[misc]
    """Brotli at a twentieth of its longest time, 9 % more bytes, so that the service starts six seconds sooner. The chart program
    alone, which readers wait for, is given the time; a file that was compressed by an earlier start is left as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thorough = Compressor(**options)

    def compress(self, path: str | os.PathLike[str]) -> list[str]:
        original = os.fspath(path)
        made = [f"{original}{suffix}" for suffix in (".br", ".gz")]
        if all(Path(each).exists() for each in made):  # the name holds the content's hash
            return made
        names: list[str] = self._thorough.compress(path) if "plotly" in Path(original).name else super().compress(path)
        return names

    @staticmethod
    def compress_brotli(data: bytes) -> bytes:
        compressed: bytes = brotli.compress(data, quality=9)
        return compressed


class HashedStaticFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """``collectstatic`` writes the names; where it never ran, as in tests, files keep their own."""

    support_js_module_import_aggregation = True

    def create_compressor(self, **options: Any) -> Compressor:
        return QuickCompressor(**options)

    def stored_name(self, name: str) -> str:
        """Name of a file as it is served."""
        known: str | None = self.hashed_files.get(self.hash_key(self.clean_name(name)))
        return name if known is None else known


@sync_and_async_middleware
def serve_static(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Answers with these files on the event loop; in a thread, where none is asked for, nothing stands in the way."""
    if not iscoroutinefunction(get_response):
        return get_response
    served: Callable[[HttpRequest], Any] = ServeStaticMiddleware(get_response)
    return served
