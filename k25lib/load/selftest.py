"""The client tests itself: a load on loopback against the truth server, its figures beside the server's log."""

import json
import subprocess
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import numpy as np

from k25lib.errors import K25Error
from k25lib.load.drive import Driver, start
from k25lib.load.metrics import Request, in_flight_mean, rounded, steady_window
from k25lib.load.prompts import Prompts, Target
from k25lib.load.worker import HAS_EPOLL

HIGHEST = 256
OUTPUT_TOKENS, TTFT_MS, ITL_MS = 64, 50, 12
# A level is honest if the mean and the p99 of TPOT and the requests in flight are off by no more than this.
MEAN_PERCENT, P99_PERCENT, IN_FLIGHT = 0.2, 1.0, 0.98


@contextmanager
def truth_server(ttft_ms=TTFT_MS, itl_ms=ITL_MS):
    """A truth server in a process of its own; yields its URL."""
    process = start("k25lib.load.truth", str(ttft_ms), str(itl_ms))
    try:
        port = process.stdout.readline()
        if not port:
            raise K25Error("the truth server of the self-test did not start; --no-selftest goes without it")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def true_times(url):
    """The truth server's log since the last call: request id -> (arrived_ns, send times in ns)."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", "/truth")
    log = json.load(connection.getresponse())
    connection.close()
    return {name: (entry["arrived_ns"], np.mean(entry["sends_ns"], axis=1)) for name, entry in log.items()}


def errors(pairs):
    """The client's figures beside the truth: error of TPOT mean and p99, of TTFT p50 (%), from pairs of
    ((ttft, tpot) of the client, (ttft, tpot) of the truth), any unit."""
    client, truth = (np.array(column, float) for column in zip(*pairs, strict=True))
    found = {}
    for name, index, figure in (
        ("tpot_mean", 1, np.mean),
        ("tpot_p99", 1, lambda values: np.quantile(values, 0.99)),
        ("ttft_p50", 0, np.median),
        ("ttft_mean", 0, np.mean),
    ):
        found[f"{name}_error_percent"] = float(figure(client[:, index]) / figure(truth[:, index]) - 1) * 100
    return found


def fidelity(url, concurrency, rounds=2):
    """One level against the truth server at `url`: errors in percent, lag, CPU a token, true mean in flight."""
    target, prompts = Target(url, "truth"), Prompts(0, 64)
    driver = Driver(target)
    requests = [
        target.request(prompts.make(concurrency, index), OUTPUT_TOKENS, f"c{concurrency}-{index}")
        for index in range(concurrency * (rounds + 1))
    ]
    result = driver.hold(requests, concurrency)
    if driver.interrupted:
        raise KeyboardInterrupt
    log = true_times(url)
    ours = [
        Request(each, OUTPUT_TOKENS, f"c{concurrency}-{each['index']}", "measured", result["start_ns"])
        for each in result["records"]
    ]
    pairs, truths = [], []
    for request in ours:
        arrived_ns, sends_ns = log[request.row["request"]]
        truths.append((arrived_ns, sends_ns[-1]))
        if request.ok and int(request.row["request"].rpartition("-")[2]) >= concurrency:  # the first burst apart
            tpot_ns = (sends_ns[-1] - sends_ns[0]) / (OUTPUT_TOKENS - 1)
            client = (request.row["ttft_ms"] * 1e6, request.row["tpot_ms"] * 1e6)
            pairs.append((client, (sends_ns[0] - arrived_ns, tpot_ns)))
    if len(pairs) != concurrency * rounds:
        raise K25Error(
            f"the self-test lost {concurrency * rounds - len(pairs)} requests on loopback; --no-selftest goes without"
        )
    window = steady_window(ours, concurrency)
    lags = np.concatenate([request.lags_ns for request in ours])
    found = errors(pairs) | {
        "concurrency": concurrency,
        "lag_ms_p99": float(np.quantile(lags, 0.99)) / 1e6,
        "cpu_us_per_token": result["cpu_s"] * 1e6 / (OUTPUT_TOKENS * len(ours)),
        "in_flight_mean": in_flight_mean([(each.send_ns, each.end_ns) for each in ours], window),
        "true_in_flight_mean": in_flight_mean(truths, window),
    }
    found = {name: rounded(value) for name, value in found.items()}
    return found | {"stamps": result["stamps"], "honest": honest(found)}


def honest(found):
    """Whether a level's figures are as near to the truth as the bounds above ask."""
    return (
        abs(found["tpot_mean_error_percent"]) <= MEAN_PERCENT
        and abs(found["tpot_p99_error_percent"]) <= P99_PERCENT
        and found["true_in_flight_mean"] >= IN_FLIGHT * found["concurrency"]
    )


def selftest(highest=HIGHEST, say=lambda line: None):
    """Find the highest honest concurrency, from `highest` (at least 256) down; the dict `selftest` of k25.load/1.

    A few seconds; each step that fails halves the concurrency.
    """
    if not HAS_EPOLL:
        known = {"honest_concurrency": None, "lag_ms_p99": None, "cpu_us_per_token": None}
        return known | {"stamps": "user", "why": "the truth server needs Linux"}
    concurrency, steps = max(highest, HIGHEST), []
    with truth_server() as url:
        while concurrency:
            say(f"self-test on loopback at C={concurrency}")
            steps.append(fidelity(url, concurrency, rounds=1 if concurrency >= 64 else 2))
            if steps[-1]["honest"]:
                break
            concurrency //= 2
    last = steps[-1]
    keys = ("lag_ms_p99", "cpu_us_per_token", "tpot_mean_error_percent", "tpot_p99_error_percent", "stamps")
    return {"honest_concurrency": concurrency} | {key: last[key] for key in keys} | {"steps": steps}
