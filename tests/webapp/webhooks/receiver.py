"""A real HTTP server on loopback that hears webhooks and answers as the test asks."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """``heard``: headers and body of each message; ``answers``: the statuses to give, the last again and again.
    ``on_message``: called before each answer.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.answers = [200]
        self.location = ""
        self.on_message: Callable[[], object] = lambda: None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.heard.append(({name.lower(): value for name, value in self.headers.items()}, body))
                receiver.on_message()
                status = receiver.answers[0] if len(receiver.answers) == 1 else receiver.answers.pop(0)
                self.send_response(status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", "9")
                self.end_headers()
                self.wfile.write(b"an answer")

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/hook"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
