"""`k25 serve` and `k25 status` as programs."""

import json
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from k25lib.cli import main
from k25lib.server.embedded import Embedded


def k25(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "k25lib", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_its_url_and_ends_with_a_signal(fake_vllm, number, capsys):
    with k25("serve") as process:
        url = process.stdout.readline().strip()
        assert main(["status", url]) == 0
        assert "serves tiny-kimi-k2.5" in capsys.readouterr().out
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "") and "ready: " in err
    assert main(["status", url]) == 1


def test_install_starts_nothing(fake_vllm, capsys):
    assert main(["serve", "--install"]) == 0
    assert capsys.readouterr().err == "writing the tiny Kimi-K2.5 (random weights)\n"
    assert [p.name for p in (fake_vllm / "cache").iterdir() if p.is_dir()] == ["tiny-kimi-k2.5"]
    assert main(["serve", "--install"]) == 0
    assert capsys.readouterr().err == ""


def test_serve_at_a_port_in_use(fake_vllm, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"k25: port {port} is in use: give another one, or none for a free one"
    )


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_is_none_installs_and_starts_nothing(fake_vllm, port, capsys):
    assert main(["serve", "--port", port]) == 2
    assert capsys.readouterr().err == f"k25: port {port} is none: give one from 1 to 65535, or none for a free one\n"
    assert not (fake_vllm / "cache").exists()


def test_status_of_a_ready_busy_server(fake_vllm, capsys):
    with Embedded(fake_vllm) as server:
        assert main(["status", server.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert found == {
        "schema": "k25.status/1", "url": server.url, "up": True, "ready": True, "why": "", "version": "0.0.fake",
        "model": "tiny-kimi-k2.5", "models": ["tiny-kimi-k2.5"], "running": 3.0, "waiting": 1.0, "busy": True,
    }  # fmt: skip


def test_status_of_nothing_and_of_something_else(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["status", url]) == 1
    assert capsys.readouterr().err == (
        f"k25: no server answers at {url} (connection refused): start it, or give another URL\n"
    )
    assert main(["status", url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["up"], found["ready"], found["busy"]) == (False, False, None)

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"hi")

        def log_message(self, *_):
            pass

    other = HTTPServer(("127.0.0.1", 0), Other)
    Thread(target=other.serve_forever, daemon=True).start()
    assert main(["status", f"http://127.0.0.1:{other.server_port}"]) == 1
    error = capsys.readouterr().err
    assert "not as vLLM does" in error and error.count("\n") == 1
    assert main(["status", f"http://127.0.0.1:{other.server_port}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["up"], found["ready"]) == (True, False) and "not as vLLM does" in found["why"]
    assert main(["status", "http://a:b"]) == 2
    other.shutdown()
