"""The HTTP client against answers that a healthy vLLM would not give."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from k25lib.client import Client, K25Error, NotReady, NotVllm, ProfilerMissing, ServerDown, normalise_url
from k25lib.errors import UsageError

MODELS = json.dumps({"data": [{"id": "tiny", "max_model_len": 2048}]})
TOKEN = json.dumps({"choices": [{"text": " a"}]})
HEALTHY = {"/health": (200, ""), "/v1/models": (200, MODELS), "/v1/completions": (200, TOKEN)}


@pytest.fixture
def answers():
    """A server whose answers are a dict path -> (status, body); `seen` has the requests' headers."""
    table, seen = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, dict(self.headers)))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = table.get(self.path, (404, '{"detail":"Not Found"}'))
            self.send_response(status)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    table["url"], table["seen"] = f"http://127.0.0.1:{server.server_port}", seen
    yield table
    server.shutdown()
    server.server_close()


def test_ready_needs_health_a_model_and_a_token(answers):
    answers.update(HEALTHY)
    assert Client(answers["url"]).ready() == "tiny"
    answers["/v1/completions"] = (500, '{"error": {"message": "EngineDeadError"}}')
    with pytest.raises(NotReady, match="can't make a token .status 500.*EngineDeadError"):
        Client(answers["url"]).ready()
    answers["/health"] = (503, "")
    with pytest.raises(NotReady, match="not healthy"):
        Client(answers["url"]).ready()


@pytest.mark.parametrize(
    "models",
    [
        (200, "<html>hello</html>"),
        (404, ""),
        (200, '{"data": 3}'),
        (200, "[]"),
        (200, '{"data": [1]}'),
        (200, '{"data": [{"id": null}]}'),
    ],
)
def test_something_that_is_no_vllm_is_told(answers, models):
    answers.update({"/health": (200, ""), "/v1/models": models})
    with pytest.raises(NotVllm, match="right port"):
        Client(answers["url"]).ready()


def test_a_proxy_in_front_of_a_starting_server_is_not_ready_yet(answers):
    answers.update({"/health": (200, ""), "/v1/models": (503, "")})
    with pytest.raises(NotReady, match="behind it not yet"):
        Client(answers["url"]).ready()


def test_an_unknown_model_lists_the_served_ones(answers):
    answers.update(HEALTHY)
    with pytest.raises(UsageError, match="serves tiny, not 'big'"):
        Client(answers["url"]).ready("big")


def test_a_closed_port_is_one_line():
    with pytest.raises(ServerDown, match="no server answers at http://127.0.0.1:9 .connection refused"):
        Client("127.0.0.1:9").health()


def test_the_key_is_sent_and_a_refusal_says_which_variable(answers, monkeypatch):
    answers.update(HEALTHY)
    monkeypatch.setenv("K25_API_KEY", "s3cret")
    Client(answers["url"]).models()
    assert answers["seen"][-1][1]["Authorization"] == "Bearer s3cret"
    answers["/v1/models"] = (401, "")
    with pytest.raises(K25Error, match="set K25_API_KEY"):
        Client(answers["url"]).models()


def test_a_key_with_a_line_end_is_sent_without_and_one_that_no_header_holds_is_not(answers, monkeypatch):
    answers.update(HEALTHY)
    monkeypatch.setenv("K25_API_KEY", " s3cret\r\n")
    Client(answers["url"].replace("http://", "http://me:you@")).models()
    assert answers["seen"][-1][1]["Authorization"] == "Bearer s3cret"
    for key in ("two\nlines", "schlüssel"):
        monkeypatch.setenv("K25_API_KEY", key)
        with pytest.raises(UsageError, match="K25_API_KEY") as error:
            Client(answers["url"])
        assert key not in str(error.value)


@pytest.mark.parametrize("token", ["null", "[]", '"x"', '{"choices": {}}', '{"choices": ["x"]}', '{"choices": null}'])
def test_an_answer_of_another_shape_is_no_token(answers, token):
    answers.update(HEALTHY | {"/v1/completions": (200, token)})
    with pytest.raises(NotReady, match="can't make a token"):
        Client(answers["url"]).ready()


def test_no_proxy_stands_between_us_and_this_machine(answers, monkeypatch):
    answers.update(HEALTHY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    port = answers["url"].rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "127.1"):
        assert Client(f"{host}:{port}").ready() == "tiny"
    with pytest.raises(ServerDown, match="set NO_PROXY=gpu-box to go without it"):
        Client("http://gpu-box:8000").health()


def test_profiler_answers(answers):
    client = Client(answers["url"])
    with pytest.raises(ProfilerMissing, match="--profiler-config"):
        client.start_profile()
    answers["/start_profile"] = (409, '{"error": "already"}')
    with pytest.raises(K25Error, match="somebody else has started the profiler"):
        client.start_profile()
    answers["/start_profile"] = (200, "")
    assert client.start_profile() is None
    answers["/stop_profile"] = (500, "rank 1 died")
    with pytest.raises(K25Error, match="rank 1 died"):
        client.stop_profile()


def test_metrics_keep_labels_and_counter_names(answers):
    answers["/metrics"] = (
        200,
        '# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{model_name="tiny"} 65.0\n'
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 1.0\n',
    )
    client = Client(answers["url"])
    assert client.metrics()["vllm:generation_tokens_total"] == [({"model_name": "tiny"}, 65.0)]
    assert client.running() == (3.0, None)
    answers["/metrics"] = (404, "")
    assert client.running() == (None, None)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:1/", "http://h:1"),
        ("https://h/v1", "https://h"),
        ("http://h/proxy/v1/", "http://h/proxy"),
        (" http://[::1]:8000 ", "http://[::1]:8000"),
        ("http://h/proxy/v1/chat/completions", "http://h/proxy"),
        ("http://h:1//v1//", "http://h:1"),
    ],
)
def test_urls(given, url):
    assert normalise_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        "http://",
        "ftp://h",
        "http://h:port",
        "http://h:99999",
        "/just/a/path",
        "http://[bad",
        "http://h?x=1",
        "http://h/#x",
    ],
)
def test_no_urls(given):
    with pytest.raises(UsageError, match="no server URL"):
        normalise_url(given)


def test_credentials_are_not_shown():
    assert Client("http://me:pw@127.0.0.1:9").shown_url == "http://127.0.0.1:9"
