"""A real local HTTP server that receives notifications, or rejects them for a while."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Listener:
    """Answers with the given statuses in order and then with 200. Records the requests.

    Use it as a context manager. ``url`` is its address, ``posts`` the received (headers, body).
    """

    def __init__(self, statuses=(), answer=b"ok", hold=None):
        self.statuses, self.answer, self.hold, self.posts = list(statuses), answer, hold, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posts.append((dict(self.headers), body))
                if outer.hold:
                    outer.hold.wait(10)
                status = outer.statuses.pop(0) if outer.statuses else 200
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", outer.url + "/elsewhere")
                self.send_header("Content-Length", str(len(outer.answer)))
                self.end_headers()
                try:
                    self.wfile.write(outer.answer)
                except OSError:
                    pass  # the client does not read the response

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/t0ken"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        if self.hold:
            self.hold.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def bodies(self):
        return [json.loads(body) for _, body in self.posts]
