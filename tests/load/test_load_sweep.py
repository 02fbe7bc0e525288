"""Whole sweeps against a server of known times, and against servers that behave as servers do."""

import itertools
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wild_server import CLOSE, HEAD, WildServer, event, good, plain, stream, text

from k25lib.errors import K25Error, UsageError
from k25lib.load import drive
from k25lib.load.drive import Driver, start
from k25lib.load.metrics import Request, met_share
from k25lib.load.prompts import Prompts, Target
from k25lib.load.selftest import fidelity, truth_server
from k25lib.load.stream import Outcome
from k25lib.load.sweep import send, sweep

QUICK = {"output_tokens": 4, "input_tokens": 8, "selftest": False, "seed": 3}


def answering(*answers):
    """Answer with the given lists of parts, in turn; the last one for ever."""
    return lambda body, number: answers[min(number, len(answers) - 1)]


@pytest.fixture(scope="module")
def made_certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    files = (str(folder / "cert.pem"), str(folder / "key.pem"))
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]]
    if subprocess.run(make, capture_output=True).returncode:
        pytest.skip("no openssl command")
    return files


@pytest.fixture
def certificate(made_certificate, monkeypatch):
    """(certificate, key) files of localhost, which the load client trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", made_certificate[0])
    return made_certificate


def kinds(found):
    return [row["kind"] for row in found.tables()["requests"] if row["phase"] != "probe"]


@pytest.fixture(scope="module")
def truth():
    with truth_server(ttft_ms=10, itl_ms=3) as url:
        yield url


def test_a_sweep_has_the_figures_of_the_truth(truth):
    found = sweep(
        truth, "", [1, 4], 32, 16, requests_per_slot=3, seed=11, gpus=2, slo="ttft=500,tpot=100", selftest=False
    )
    found.check()
    result = found.result
    assert (result["schema"], result["model"], result["settings"]["seed"]) == ("k25.load/1", "truth", 11)
    assert [level["concurrency"] for level in result["levels"]] == [1, 4]
    for level in result["levels"]:
        concurrency = level["concurrency"]
        assert (level["requests"], level["failed"], level["warmup_requests"]) == (3 * concurrency, 0, concurrency)
        assert level["tokens_from"] == "usage" and level["input_tokens"] == {"min": 32, "max": 32}
        assert level["tpot_ms"]["p50"] == pytest.approx(3, rel=0.5)
        assert level["goodput"] == pytest.approx(level["request_s"])
        assert level["tok_s_per_gpu"] == pytest.approx(level["output_tok_s"] / 2, rel=1e-4)
    tables = found.tables()
    assert len(tables["requests"]) == 1 + 4 * 1 + 4 * 4 and len(tables["chunks"]) == 21 * 16
    assert tables["levels"][1]["tpot_ms_mean"] == result["levels"][1]["tpot_ms"]["mean"]
    json.dumps(result, allow_nan=False)


@pytest.mark.slow
def test_the_client_agrees_with_the_server_log(truth):
    with truth_server() as url:
        found = fidelity(url, 16)
    assert abs(found["tpot_mean_error_percent"]) < 0.5
    assert found["stamps"] == ("kernel" if sys.platform == "linux" else "user")


@pytest.mark.slow
def test_repeats_have_new_prompts_and_are_pooled():
    with WildServer(lambda body, number: good(4, len(body["prompt"]))) as server:
        found = sweep(server.url, "wild", [2], **QUICK, requests_per_slot=2, repeats=3)
    prompts = [tuple(seen["body"]["prompt"]) for seen in server.seen]
    assert len(set(prompts)) == len(prompts) == 1 + 3 * 6  # the probe; two warm-up and four measured each
    assert found.result["levels"][0]["requests"] == 12 and found.result["levels"][0]["repeats"] == 3


def test_answers_of_one_token(truth):
    found = sweep(truth, "truth", [2], output_tokens=1, requests_per_slot=2, selftest=False)
    found.check()
    (row,) = found.tables()["levels"]
    assert (row["tpot_ms_mean"], row["itl_ms_mean"]) == (None, None) and row["ttft_ms_mean"] > 0


@pytest.mark.slow
def test_open_loop(truth):
    found = sweep(truth, "truth", rate=40, max_seconds=1, output_tokens=4, input_tokens=8, seed=5, selftest=False)
    level = found.result["levels"][0]
    assert (level["mode"], level["concurrency"], level["rate"]) == ("open", None, 40)
    assert level["requests"] == len(kinds(found)) > 15
    assert all(row["late_ms"] >= 0 for row in found.tables()["requests"] if row["phase"] == "measured")
    assert level["failed"] == 0 and found.result["plateau"]["verdict"] == "cannot tell"
    assert "open loop" in found.result["plateau"]["why"]


def test_send_sends_exactly_so_many(truth):
    rows = send(truth, "truth", 5, 2, 8, 6)
    assert len(rows) == 5 and all(row["ok"] and row["output_tokens"] == 6 for row in rows)
    assert all(row["tpot_ms"] is not None for row in rows)


@pytest.mark.slow
def test_max_seconds_stops_sending(truth):
    found = sweep(truth, "truth", [2], requests_per_slot=1000, max_seconds=0.5, output_tokens=8, selftest=False)
    level = found.result["levels"][0]
    assert 4 < level["requests"] < 200 and level["not_sent"] > 1000 and level["failed"] == 0


@pytest.mark.slow
def test_a_tight_limit_keeps_what_was_in_flight():
    slow = stream(*[event(text())] * 2)[:-1]
    with WildServer(answering(good(4), [*slow, 9.0])) as server:
        found = sweep(server.url, "wild", [1], **QUICK, warmup=False, max_seconds=0.5)
    assert kinds(found) == ["unfinished"]
    assert (found.result["levels"][0]["failed"], found.result["levels"][0]["unfinished"]) == (0, 1)
    with pytest.raises(K25Error, match="unfinished"):
        found.check()


def test_failures_are_rows_and_the_figures_come_from_the_rest():
    answers = [good(4, 8), plain(500, b'{"error": {"message": "no memory"}}'), [HEAD, CLOSE], good(4), good(4), good(4)]
    with WildServer(answering(good(4), *answers)) as server:
        found = sweep(server.url, "wild", [1], **QUICK, warmup=False, requests_per_slot=6)
    found.check()
    assert kinds(found) == ["ok", "http_500", "cut", "ok", "ok", "ok"]
    level = found.result["levels"][0]
    assert (level["requests"], level["failed"], level["errors"]) == (6, 2, {"http_500": 1, "cut": 1})
    assert level["first_error"] == "no memory" and level["ttft_ms"]["n"] == 4


def test_a_first_request_that_fails_is_a_row_and_not_the_end():
    with WildServer(answering(plain(500, b"warming up"), good(4))) as server:
        found = sweep(server.url, "wild", [1], **QUICK)
    found.check()
    assert [row["kind"] for row in found.tables()["requests"] if row["phase"] == "probe"] == ["http_500", "ok"]


def test_a_stalled_stream_times_out():
    stalled = [*stream(event(text()), event(text()))[:-1], 9.0]
    with WildServer(answering(good(4), stalled, good(4))) as server:
        found = sweep(server.url, "wild", [1], **QUICK, warmup=False, requests_per_slot=2, chunk_timeout_s=0.5)
    assert kinds(found) == ["timeout", "ok"]


def test_comments_keep_no_stream_alive():
    pings = [HEAD, *([b"7\r\n: ping\n\r\n", 0.1] * 50)]
    with WildServer(answering(good(4), pings, good(4))) as server:
        more = {"first_timeout_s": 0.5, "chunk_timeout_s": 0.2}
        found = sweep(server.url, "wild", [1], **QUICK, warmup=False, requests_per_slot=2, **more)
    assert kinds(found) == ["timeout", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("early", [b": ping\n\n", event({"delta": {"role": "assistant", "content": ""}})])
def test_before_the_first_token_the_longer_time_out_holds(early):
    waited = [HEAD, *stream(early)[1:-1], 0.9, *good(4)[1:]]
    with WildServer(answering(waited)) as server:
        rows = send(server.url, "wild", 1, 1, 8, 4, chunk_timeout_s=0.2, first_timeout_s=5)
    assert rows[0]["kind"] == "ok" and rows[0]["ttft_ms"] >= 900


@pytest.mark.parametrize(("end", "kind"), [(b"0\r\n\r\njunk", "ok"), (b"zz\r\n", "bad_http")])
def test_an_end_in_the_middle_of_a_piece_is_found_without_a_time_out(end, kind):
    with WildServer(answering([*good(4)[:-1], end, 9.0], good(4))) as server:
        rows = send(server.url, "wild", 2, 1, 8, 4, chunk_timeout_s=8)
    assert [row["kind"] for row in rows] == [kind, "ok"]


def test_answers_that_came_at_one_moment_are_told():
    with WildServer(answering([b"".join(good(4))])) as server:
        level = sweep(server.url, "wild", [1], **QUICK, requests_per_slot=3).result["levels"][0]
    assert level["came_whole"] == 3 and "3 answers came at one moment" in level["remarks"]
    json.dumps(level, allow_nan=False)


@pytest.mark.slow
def test_failures_of_the_warm_up_are_told():
    with WildServer(answering(good(4), plain(500, b"cold"), good(4))) as server:
        level = sweep(server.url, "wild", [1], **QUICK).result["levels"][0]
    assert (level["failed"], level["warmup_failed"]) == (0, 1) and "failed in the warm-up: 1" in level["remarks"]


@pytest.mark.parametrize("max_seconds", [1e-12, 1e308])
def test_any_positive_time_is_a_limit(truth, max_seconds):
    found = sweep(truth, "truth", [1], 8, 2, requests_per_slot=5, max_seconds=max_seconds, selftest=False)
    assert found.result["levels"][0]["requests"] == (1 if max_seconds < 1 else 5)


@pytest.mark.slow
def test_equal_rates_are_one_level(truth):
    found = sweep(truth, "truth", rate=[50, 50], max_seconds=0.2, output_tokens=2, input_tokens=8, selftest=False)
    assert [level["rate"] for level in found.result["levels"]] == [50]


@pytest.mark.slow
def test_metrics_without_a_number_are_no_metrics():
    page = "vllm:num_requests_running NaN\nvllm:generation_tokens_total +Inf\nvllm:kv_cache_usage_perc NaN\n"
    with WildServer(answering(good(4)), metrics=lambda server: page) as server:
        result = sweep(server.url, "wild", [1], **QUICK).result
    json.dumps(result, allow_nan=False)
    assert (result["levels"][0]["server"]["tokens"], result["levels"][0]["server"]["running_max"]) == (None, None)


@pytest.mark.parametrize("host", ["a" * 70 + ".com", ".x"])
def test_a_name_that_no_host_can_have_is_one_line(host):
    with pytest.raises(K25Error, match="cannot resolve .*check the URL"):
        sweep(f"http://{host}", "m", [1], **QUICK)


def test_a_refused_key_says_which_variable():
    with (
        WildServer(answering(plain(401, b'{"error": "Unauthorized"}'))) as server,
        pytest.raises(K25Error, match="http_401: Unauthorized; set K25_API_KEY"),
    ):
        sweep(server.url, "wild", [1], **QUICK)


def test_a_worker_that_dies_at_once_is_an_error(truth, monkeypatch):
    monkeypatch.setattr(drive, "start", lambda module: start("k25lib.no_such_module"))
    with pytest.raises(K25Error, match="ended without a result"):
        send(truth, "truth", 4000, 4, 64, 2)


def test_ctrl_c_before_the_worker_has_begun_is_an_interrupt(truth, monkeypatch):
    def pressed(module):
        os.kill(os.getpid(), signal.SIGINT)
        return start("k25lib.no_such_module")

    monkeypatch.setattr(drive, "start", pressed)
    found = sweep(truth, "truth", [1], 8, 2, selftest=False)
    assert found.interrupted and (found.result["levels"], found.result["complete"]) == ([], False)
    json.dumps(found.result, allow_nan=False)


def test_all_failing_quotes_the_first_cause():
    with WildServer(answering(good(4), plain(503, b'{"message": "overloaded"}'))) as server:
        found = sweep(server.url, "wild", [1, 2, 4], **QUICK)
        assert [level["concurrency"] for level in found.result["levels"]] == [1]
        with pytest.raises(K25Error, match="all 5 requests .* failed; the first: http_503: overloaded"):
            found.check()
        with pytest.raises(K25Error, match="overloaded"):
            send(server.url, "wild", 2, 1)
        with pytest.raises(K25Error, match="all 5 requests .* overloaded"):  # the probes fail
            sweep(server.url, "wild", [1], **QUICK)


@pytest.mark.slow
def test_a_server_that_goes_away_keeps_the_levels_measured():
    with WildServer(None) as server:

        def answer(body, number):
            if number == 8:
                server.listener.close()
            return good(4) if number < 8 else [CLOSE]

        server.answer = answer
        found = sweep(server.url, "wild", [1, 2, 4], **QUICK, requests_per_slot=3)
    assert found.result["levels"][0]["failed"] == 0
    assert not found.result["complete"] and ("failed" in found.error or "refused" in found.error)
    assert set(kinds(found)) >= {"ok", "cut"}


@pytest.mark.parametrize(("per_slot", "not_sent"), [(6, False), (400, True)])
def test_a_server_that_dies_in_the_last_level_ends_the_sweep(per_slot, not_sent):
    with WildServer(None) as server:

        def answer(body, number):
            if number == 4:
                server.listener.shutdown(socket.SHUT_RDWR)
                server.listener.close()
            return good(4) if number < 4 else [CLOSE]

        server.answer = answer
        found = sweep(server.url, "wild", [1], **QUICK, warmup=False, requests_per_slot=per_slot)
    level = found.result["levels"][0]
    assert "takes no more connections: [Errno 111] Connection refused" in found.error
    assert not found.result["complete"] and bool(level["not_sent"]) is not_sent
    assert level["requests"] + level["not_sent"] == per_slot
    assert level["failed"] == sum(level["errors"].values()) < 150


@pytest.mark.slow
def test_text_stands_in_where_token_ids_are_refused():
    def answer(body, number):
        if isinstance(body["prompt"], list):
            return plain(400, b'{"message": "prompt must be text"}')
        return good(4, len(body["prompt"].split()) + 1)

    with WildServer(answer) as server:
        found = sweep(server.url, "wild", [1], **QUICK)
    assert found.result["prompts"]["shape"] == "text"
    assert found.result["levels"][0]["input_tokens"] == {"min": 8, "max": 8}


@pytest.mark.slow
def test_chat_is_calibrated():
    def answer(body, number):
        assert body["messages"][0]["role"] == "user"
        return good(4, len(body["messages"][0]["content"].split()) + 5)

    with WildServer(answer) as server:
        found = sweep(server.url, "wild", [2], **QUICK, api="chat")
    assert {seen["path"] for seen in server.seen} == {"/v1/chat/completions"}
    assert found.result["levels"][0]["input_tokens"] == {"min": 8, "max": 8}


SIZED_BODY = b"".join(event(text()) for _ in range(3)) + event(text("a", "length")) + b"data: [DONE]\n\n"
SIZED = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(SIZED_BODY), SIZED_BODY]


@pytest.mark.parametrize("parts", [good(4), SIZED], ids=["chunked", "sized"])
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_connections_are_kept_alive(parts, tls, request):
    certificate = request.getfixturevalue("certificate") if tls else None
    with WildServer(answering(parts), certificate=certificate) as server:
        rows = send(server.url, "wild", 20, 2, 8, 4)
    assert [(row["kind"], row["retried"]) for row in rows] == [("ok", False)] * 20
    assert server.connections() == 2


def with_header(parts, header):
    return [parts[0].replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n\r\n", 1), *parts[1:]]


@pytest.mark.parametrize(
    ("parts", "connections"),
    [
        (with_header(good(4), b"Connection: close"), 6),
        (with_header(SIZED, b"Connection: close"), 6),
        ([SIZED[0].replace(b"1.1", b"1.0"), SIZED_BODY], 6),
        ([with_header(SIZED, b"Connection: keep-alive")[0].replace(b"1.1", b"1.0"), SIZED_BODY], 2),
        ([b"HTTP/1.0 200 OK\r\n\r\n", SIZED_BODY, CLOSE], 6),
    ],
)
def test_what_the_response_says_of_the_connection_is_heeded(parts, connections):
    with WildServer(answering(parts)) as server:
        rows = send(server.url, "wild", 6, 2, 8, 4)
    assert [(row["kind"], row["retried"]) for row in rows] == [("ok", False)] * 6
    assert server.connections() == connections


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("pause", [[], [0.3]], ids=["at once", "with others in flight"])
def test_a_keep_alive_connection_closed_meanwhile_is_opened_again(tls, pause, request):
    certificate = request.getfixturevalue("certificate") if tls else None

    def answer(body, number):
        return [*good(4), *([*pause, CLOSE] if number % 3 == 2 else [])]

    with WildServer(answer, certificate=certificate) as server:
        rows = send(server.url, "wild", 12, 2, 8, 4)
    assert {row["kind"] for row in rows} == {"ok"} and len(server.seen) == 12
    assert server.connections() > 2


def test_opening_a_connection_does_not_hold_up_the_tokens_of_others(certificate):
    head, *parts = with_header(good(20), b"Connection: close")
    paced = [head, *(each for part in parts for each in (part, 0.02))]
    with WildServer(answering(paced), certificate=certificate, handshake_s=0.25) as server:
        target, prompts = Target(server.url, "wild"), Prompts(3, 8)
        plan = [target.request(prompts.make(index), 20, f"r{index}") for index in range(9)]
        result = Driver(target).hold(plan, 3)
    requests = [Request(each, 20, "r", "measured", result["start_ns"]) for each in result["records"]]
    assert [request.row["kind"] for request in requests] == ["ok"] * 9 and result["connects"] == 9
    assert met_share(requests, 3) == 0


@pytest.mark.parametrize("status", [401, 503])
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_an_answer_before_a_large_request_is_sent_closes_the_connection(status, tls, request):
    certificate = request.getfixturevalue("certificate") if tls else None
    early = plain(status, b'{"error": {"message": "not now"}}')[0]
    with WildServer(
        answering(good(4)), certificate=certificate, early=lambda length: early if length > 1_000_000 else None
    ) as server:
        target, prompts = Target(server.url, "wild"), Prompts(3, 8)
        large, small = (
            target.request(prompts.make("x", index) * times, 4, f"r{index}") for index, times in enumerate((200_000, 1))
        )
        records = Driver(target).hold([large, small] * 3, 1)["records"]
    outcomes = [Outcome(each, 4) for each in records]
    assert [outcome.kind for outcome in outcomes] == [f"http_{status}", "ok"] * 3
    assert outcomes[0].message == "not now" and server.connections() == 3


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_an_answer_after_a_large_request_keeps_the_connection(tls, request):
    certificate = request.getfixturevalue("certificate") if tls else None
    with WildServer(answering(plain(503, b"later"), good(4)), certificate=certificate) as server:
        rows = send(server.url, "wild", 2, 1, 400_000, 4)
    assert [row["kind"] for row in rows] == ["http_503", "ok"] and server.connections() == 1


@pytest.mark.slow
def test_servers_that_close_after_each_response():
    old = [b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", SIZED_BODY, CLOSE]
    polite = [good(4)[0].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), *good(4)[1:], CLOSE]
    for parts in (old, polite):
        with WildServer(answering(parts)) as server:
            found = sweep(server.url, "wild", [2], **QUICK, requests_per_slot=2)
        assert set(kinds(found)) == {"ok"}, parts


def metrics_page(hits):
    def page(server):
        number, lines = len(server.seen), []
        for name, value in {
            "generation_tokens_total": 4 * number,
            "prefix_cache_queries_total": 8 * number,
            "prefix_cache_hits_total": hits * number,
            "time_to_first_token_seconds_sum": 0.5 * number,
            "time_to_first_token_seconds_count": number,
            "num_requests_running": 2,
            "num_requests_waiting": 0,
        }.items():
            lines.append(f'vllm:{name}{{model_name="wild"}} {value}')
        return "\n".join(lines) + "\n"

    return page


@pytest.mark.parametrize(("hits", "rate", "void"), [(0, 0, False), (4, 0.5, True)])
def test_crosscheck_and_prefix_hits(hits, rate, void):
    with WildServer(answering(good(4)), metrics=metrics_page(hits)) as server:
        level = sweep(server.url, "wild", [2], **QUICK).result["levels"][0]
    assert level["crosscheck"]["tokens"] == {"client": 40, "server": 40, "difference_percent": 0, "agrees": True}
    assert (
        level["crosscheck"]["ttft_ms"]["agrees"] is False and "the server counts otherwise: ttft_ms" in level["remarks"]
    )
    assert ("void: 50.0% prefix hits" in level["remarks"]) is void
    assert (level["prefix_hit_rate"], level["void"]) == (rate, void)


def test_https_to_a_plain_server_says_so():
    with (
        WildServer(answering(good(4))) as server,
        pytest.raises(K25Error, match="does the server speak https"),
    ):
        sweep(server.url.replace("http", "https"), "wild", [1], **QUICK)


def test_ipv6():
    try:
        server = WildServer(answering(good(4)), host="::1")
    except OSError:
        pytest.skip("no IPv6")
    with server:
        sweep(f"http://[::1]:{server.port}/proxy/v1/", "wild", [1], **QUICK).check()
    assert {seen["path"] for seen in server.seen} == {"/proxy/v1/completions"}
    assert {seen["headers"]["host"] for seen in server.seen} == {f"[::1]:{server.port}"}


@pytest.mark.slow
def test_https_keeps_the_kernel_stamps(certificate, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with WildServer(lambda body, number: [*good(4)[:3], 0.02, *good(4)[3:]], certificate=certificate) as server:
        for model in ("wild", ""):  # both ways to connect say what to do
            with pytest.raises(K25Error, match="not accepted .*SSL_CERT_FILE"):
                sweep(server.url, model, [1], **QUICK)
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        found = sweep(server.url, "", [2], **QUICK)
    assert set(kinds(found)) == {"ok"}
    level = found.result["levels"][0]
    assert level["client"]["stamps"] == ("kernel" if sys.platform == "linux" else "user")
    assert level["e2e_ms"]["p50"] > 19


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("K25_API_KEY", "k-123")
    with WildServer(answering(good(4))) as server:
        result = sweep(server.url, "wild", [1], **QUICK).result
    assert {seen["headers"]["authorization"] for seen in server.seen} == {"Bearer k-123"}
    assert "k-123" not in json.dumps(result)


@pytest.mark.parametrize(
    "bad",
    [
        {"concurrency": [0]},
        {"concurrency": []},
        {"concurrency": [1.5]},
        {"concurrency": [10**9]},
        {"output_tokens": 0},
        {"requests_per_slot": 0},
        {"rate": -1},
        {"rate": float("nan")},
        {"max_seconds": 0},
        {"chunk_timeout_s": 0},
        {"first_timeout_s": -1},
        {"gpus": 0},
        {"rate": 1e9},
        {"requests_per_slot": 10**7},
        {"slo": "fast"},
        {"slo": "ttft=inf"},
        {"slo": {"ttft": None}},
        {"rate": 0.01, "max_seconds": 5},
        {"rate": [True]},
        {"input_tokens": 10**9},
        {"api": "embeddings"},
    ],
)
def test_bad_values_are_usage_errors(bad):
    with pytest.raises(UsageError):
        sweep("http://127.0.0.1:9", "m", **{"selftest": False} | bad)


def command(*words, **more):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-m", "k25lib", "load", *words], stdout=-1, stderr=-1, text=True, env=environment, **more
    )


def test_no_server_is_one_line_and_exit_1():
    process = command("http://127.0.0.1:9", "--no-selftest", "--json")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert len(err.splitlines()) == 1 and "127.0.0.1:9" in err


@pytest.mark.parametrize("name", ["Counters.after", "level"])
def test_ctrl_c_between_the_load_and_its_figures_loses_nothing(truth, monkeypatch, name):
    owner, _, name = f"k25lib.load.sweep.{name}".rpartition(".")
    owner = pkgutil.resolve_name(owner)
    call, pressed = getattr(owner, name), iter([True])

    def interrupted(*args):
        if next(pressed, False):
            raise KeyboardInterrupt
        return call(*args)

    monkeypatch.setattr(owner, name, interrupted)
    found = sweep(truth, "truth", [1, 2], 8, 4, requests_per_slot=2, selftest=False)
    assert found.interrupted and [level["requests"] for level in found.result["levels"]] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_was_measured(truth, number):
    process = command(
        truth, "--model", "truth", "--concurrency", "1,2", "--requests-per-slot", "4000", "--output-tokens", "8",
        "--no-selftest", "--json", start_new_session=True,
    )  # fmt: skip
    lines = itertools.takewhile(lambda line: "requests done" not in line, process.stderr)
    list(lines)
    time.sleep(1)
    os.killpg(process.pid, number)  # as a terminal does: to the whole group
    out, err = process.communicate(timeout=30)
    result = json.loads(out)
    assert process.returncode == 128 + number and "interrupted" in err
    level = result["levels"][0]
    assert level["requests"] > 5 and level["errors"] == {} and level["unfinished"] <= 1
    assert level["tpot_ms"]["p50"] > 0
    assert not result["complete"]
