"""A stand-in for the interpreter that has vLLM: writes a "tiny model", serves vLLM's API, has a worker and /dev/shm.

What the server does beside is told by FAKE_VLLM in its environment: `die` (an error in the log, exit 1), `port` (the
first start finds its port taken), `deaf` (SIGTERM is ignored), `slow` (never ready).
"""

import gzip
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Api(BaseHTTPRequestHandler):
    """The calls that readiness needs."""

    def _send(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):  # noqa: N802
        answers = {
            "/health": b"",
            "/version": b'{"version": "0.0.fake"}',
            "/v1/models": json.dumps({"data": [{"id": "tiny-kimi-k2.5"}]}).encode(),
            "/metrics": b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 1.0\n',
        }
        found = self.path in answers
        self._send(answers.get(self.path, b"{}"), 200 if found else 404)

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("_profile"):
            return self._send(b"", profile(self.path))
        return self._send(b'{"choices": [{"text": "x"}]}')

    def log_message(self, *_):
        pass


def profile(path):
    """The profiler of 0.32 at TP=2: the status of an answer; a stop writes a trace a rank."""
    if not profiler:
        return 404
    if path == "/start_profile":
        if profiler.get("running"):
            return 409
        profiler["running"] = True
    elif profiler.pop("running", False) and profiler["profiler"] == "torch":
        folder = Path(profiler["torch_profiler_dir"])
        folder.mkdir(exist_ok=True)
        for rank in (0, 1):
            trace = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": []}
            data = gzip.compress(json.dumps(trace).encode())
            (folder / f"rank{rank}.{time.time_ns()}.pt.trace.json.gz").write_bytes(data)
    return 200


profiler = {}


def main(words):
    if words[0].endswith("tiny_model.py"):
        (Path(words[1]) / "config.json").write_text("{}")
        return
    if "--profiler-config" in words:
        profiler.update(json.loads(words[words.index("--profiler-config") + 1]))
    how = os.environ.get("FAKE_VLLM", "")
    if how == "die":
        print("(Worker_TP0 pid=7) ERROR 11-29 21:40:17 [core.py:1] ValueError: no room for the cache", flush=True)
        print("(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    once = Path("port-was-taken")
    if how == "port" and not once.exists():
        once.touch()
        print("OSError: [Errno 98] Address already in use", flush=True)
        sys.exit(1)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kept = []
    if "--tensor-parallel-size" in words:  # as the embedded server is started
        with Path(f"/dev/shm/k25-test-{os.getpid()}").open("w+b") as shared:
            shared.write(b"x" * 4096)
            shared.flush()
            kept.append(mmap.mmap(shared.fileno(), 4096))
    worker = ["sleep", "1000"] if how == "deaf" else ["sh", "-c", "read line"]  # the latter ends with its parent
    workers = [subprocess.Popen(worker, stdin=subprocess.PIPE)]
    print(json.dumps({"argv": words, "env": dict(os.environ)}), flush=True)
    if how == "slow":
        time.sleep(1000)
    ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Api).serve_forever()
    kept.clear(), workers.clear()


main(sys.argv[1:])
