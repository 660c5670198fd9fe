"""Stands in for llama-server. A test appends `counters()`, ADD_NORM's at the end, `completion(request)` and `serve()`."""

import http.server
import json
import os
import signal
import sys


def stop(*_):
    with open(os.environ["GGML_FLASHRT_STATS"], "w") as f:
        json.dump({"windows": {"ADD_NORM": counters()}}, f)
    os._exit(0)


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0, request
        content, steps = completion(request)
        self.answer({"content": content, "completion_probabilities": steps})

    def log_message(self, *_):
        pass


def serve():
    signal.signal(signal.SIGTERM, stop)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
