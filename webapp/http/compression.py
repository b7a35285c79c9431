"""Pages and answers of the API leave compressed; what is streamed leaves as it comes."""

from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware


class CompressWhole(GZipMiddleware):
    """Django's gzip, with its random padding against guesses at secrets, for answers that are there as a whole.

    Events and downloads are streamed: gzip would hold an event back until its buffer is full.
    """

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if isinstance(response, StreamingHttpResponse):
            return response
        compressed: HttpResponseBase = super().process_response(request, response)
        return compressed
