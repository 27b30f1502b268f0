"""Where a summary is posted: again what may succeed the next time, and once what will not."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_gpufleet.run import webhook
from pytest_gpufleet.run.webhook import TRIES, post
from pytest_gpufleet.safe_files import sha256


class Receiver(ThreadingHTTPServer):
    """`statuses`: of its next answers, then 200. `heard`: the key and the body of each request."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses = []
        self.heard = []
        self.tokens = set()
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class Answer(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.headers["Idempotency-Key"], body))
        self.server.tokens.add(self.headers["Authorization"])
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Location", self.server.url + "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        self.server.heard.append(("GET", b""))

    def log_message(self, format, *args):
        pass


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setattr(webhook, "PAUSE_SECONDS", 0.0)
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("statuses", "times", "why"), [
    ([202], 1, ""),
    ([503, 429], 3, ""),
    ([503] * TRIES, TRIES, "HTTP status 503"),
    ([401], 1, "HTTP status 401"),
    ([302], 1, "HTTP status 302"),
])  # fmt: skip
def test_what_may_succeed_is_tried_again_under_one_key(receiver, statuses, times, why, monkeypatch):
    monkeypatch.setenv("GPUFLEET_WEBHOOK_TOKEN", "t0ken")
    receiver.statuses += statuses
    assert post(receiver.url, "{}", "abc") == (why and f"127.0.0.1: {why}")
    assert (receiver.heard, receiver.tokens) == ([('"abc"', b"{}")] * times, {"Bearer t0ken"})


def test_a_run_posts_its_summary_and_its_verdict_stays_where_that_fails(fleet, receiver):
    """The address may hold a secret, and stands in no file of the run."""
    receiver.statuses += [401]  # which is not tried again
    for text in ("was not posted (127.0.0.1: HTTP status 401)", "was posted"):
        receiver.heard.clear()
        run = fleet("def test_it(): pass", "--fleet-webhook", receiver.url)
        assert (run.status, text in run.text) == (0, True), run.text
        (folder,) = run.folders
        key, body = receiver.heard[-1]
        assert (key, body) == (f'"{sha256(folder / "evidence.jsonl")}"', (folder / "summary.json").read_bytes())
        assert json.loads(body)["verdict"] == "REHEARSAL"
        assert b"/hook" not in (folder / "evidence.jsonl").read_bytes()
