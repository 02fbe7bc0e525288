"""The figures of a level, from exchanges whose times are known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wild_server import event, good, stream, text, usage

from k25lib.errors import UsageError
from k25lib.load import counters, levels, metrics, plateau
from k25lib.load.prompts import Prompts, Target, poisson

MS = 1_000_000


def request(
    times_ms, parts, tokens, send_ms=0.0, index=0, slot=0, phase="measured", due_ms=None, end="complete", lag_ms=0.001
):
    """A request sent at `send_ms` whose parts (the head first) came at `times_ms`, and were read `lag_ms` later."""
    pieces = [(int(at * MS), int((at + lag_ms) * MS), part) for at, part in zip(times_ms, parts, strict=True)]
    exchange = {"index": index, "slot": slot, "free_ns": None, "due_ns": due_ms and int(due_ms * MS)}
    exchange |= {"send_ns": int(send_ms * MS), "sent_ns": int(send_ms * MS) + 20_000, "end_ns": int(times_ms[-1] * MS)}
    exchange |= {"end": end, "detail": None, "retried": False, "pieces": pieces}
    return metrics.Request(exchange, tokens, f"r-{index}", phase, 0)


def steady(send_ms, tokens=5, ttft_ms=50.0, itl_ms=10.0, **more):
    """A good request with even times."""
    parts = good(tokens)
    times = [send_ms] + [send_ms + ttft_ms + itl_ms * min(i, tokens - 1) for i in range(len(parts) - 1)]
    return request(times, parts, tokens, send_ms, **more)


def test_latencies_of_one_request():
    row = steady(100).row
    assert (row["ttft_ms"], row["tpot_ms"], row["e2e_ms"]) == (50, 10, 90)
    assert (row["input_tokens"], row["output_tokens"], row["sent_ms"], row["send_us"]) == (8, 5, 100, 20)


def test_open_loop_latency_counts_from_when_the_request_was_due():
    row = steady(100, due_ms=70).row
    assert (row["ttft_ms"], row["e2e_ms"], row["late_ms"]) == (80, 120, 30)


def test_four_tokens_in_a_chunk_are_four_intervals():
    parts = stream(*[event(text("a b c d"))] * 3, event(text("a b c d", "length")), event(**usage(16)))
    one = request([0, 50, 98, 146, 194, 194, 194], parts, 16)
    itl = metrics.latencies([one])["itl_ms"]
    assert (itl["mean"], itl["p50"], itl["p99"], itl["n"]) == (12, 12, 12, 12)
    assert one.row["tpot_ms"] == pytest.approx(144 / 15)


def test_one_token_has_no_tpot():
    assert steady(0, tokens=1).row["tpot_ms"] is None


def test_failures_are_in_no_latency():
    broken = request([0, 50, 60], good(5)[:3], 5, end="timeout")
    figures = metrics.latencies([steady(0), broken])
    assert figures["ttft_ms"]["n"] == 1
    assert broken.row["ttft_ms"] is None


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=60))
@settings(max_examples=30, deadline=None)
def test_summary_agrees_with_numpy(values):
    found = metrics.summary([[value] for value in values])
    assert found["mean"] == pytest.approx(np.mean(values), rel=1e-5)
    assert found["p90"] == pytest.approx(np.quantile(values, 0.9), rel=1e-5)
    assert found["low"] <= found["mean"] * (1 + 1e-5) and found["high"] >= found["mean"] * (1 - 1e-5)


def test_bootstrap_interval_covers_the_mean_nine_times_in_ten():
    source = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = metrics.summary(source.normal(100, 10, (30, 1)))
        hits += found["low"] <= 100 <= found["high"]
    assert 180 <= hits <= 198


def test_steady_window_in_flight_and_tokens():
    """Two slots, a warm-up each, then two rounds; slot 1 runs 5 ms behind."""
    every = []
    for slot, shift in ((0, 0.0), (1, 5.0)):
        for turn, phase in enumerate(("warmup", "measured", "measured")):
            every.append(steady(shift + turn * 90, index=turn * 2 + slot, slot=slot, phase=phase))
    window = metrics.steady_window(every, 2)
    assert window == (95 * MS, 270 * MS)
    assert metrics.in_flight_mean([(each.send_ns, each.end_ns) for each in every], window) == pytest.approx(2.0)
    assert metrics.tokens_within(every, window) == 20 - 1  # the last token of slot 1 came later: drain
    result = {
        "cpu_s": 0.001,
        "start_ns": 0,
        "end_ns": 275 * MS,
        "stamps": "kernel",
        "priority": "normal",
        "not_sent": 0,
        "connects": 2,
    }
    server = dict.fromkeys([*counters.TOTALS, *counters.HISTOGRAMS, "running_max", "waiting_max", "kv_usage_max"])
    level = levels.level([(every, result, server)], 2, None, {"ttft": 60, "tpot": 11}, 2, 256)
    assert (level["requests"], level["warmup_requests"], level["failed"]) == (4, 2, 0)
    assert level["output_tok_s"] == pytest.approx(19 / 0.175, rel=1e-5)
    assert level["tok_s_per_gpu"] == pytest.approx(19 / 0.175 / 2, rel=1e-5)
    assert level["tok_s_per_user"] == 100
    assert level["goodput"] == pytest.approx(3 / 0.175, rel=1e-5)
    assert level["client"]["limited"] is False
    assert metrics.wave_rates(every[:0], 2, 2.0) == []
    assert level["wave_tok_s"] == pytest.approx([2 * 10 / 0.18] * 2, rel=1e-5)


def test_a_slot_that_stays_empty_marks_the_level():
    state = levels.client_state(
        [{"cpu_us_per_token": 9, "cpu_share": 0.1, "lag_ms_p99": 0.1, "late_ms_p99": 90, "stamps": "kernel"}
         | {"priority": "normal", "met_share": 0.0, "connects": 4}],
        {"tpot_ms": {"mean": 10.0}, "in_flight_mean": 3.6}, 4, None, 256,
    )  # fmt: skip
    assert state["limited"] and state["why"] == "only 3.6 of 4 requests in flight"


def stalled(lag_ms, stall_tokens=6, itl_ms=10.0):
    """A good request of 11 tokens whose first `stall_tokens` came in one read, `lag_ms` after the last of them."""
    parts = good(11)
    first = 50.0 + itl_ms * (stall_tokens - 1)
    each = [max(first, 50.0 + itl_ms * min(index, 10)) for index in range(len(parts) - 1)]
    return request([first, *each], parts, 11, lag_ms=lag_ms)


def test_chunks_that_met_in_the_socket_are_counted_where_the_read_was_late():
    assert stalled(0.1).row["tpot_ms"] == 5  # the truth is 10
    assert metrics.met_share([stalled(8)], 4) == pytest.approx(5 / 11)
    assert metrics.met_share([stalled(0.1)], 4) == 0  # read at once: the server sent them together
    assert metrics.met_share([stalled(1.5), steady(0)], 64) == 0  # the loop let them gather
    assert metrics.met_share([], 4) is None


def test_a_level_whose_chunks_met_says_that_the_client_was_the_limit():
    figures = {"cpu_us_per_token": 9, "cpu_share": 0.1, "lag_ms_p99": 0.1, "late_ms_p99": 0, "stamps": "kernel"}
    figures |= {"priority": "normal", "met_share": 0.3, "connects": 4}
    state = levels.client_state([figures], {"tpot_ms": {"mean": 5.0}, "in_flight_mean": 4.0}, 4, None, 256)
    assert state["limited"] and state["why"].startswith("30.0% of the chunks met in the socket")


def test_above_the_honest_concurrency_is_marked():
    state = levels.client_state([], {"tpot_ms": None, "in_flight_mean": None}, 128, None, 64)
    assert "above the honest concurrency" in state["why"]


def test_the_interval_of_a_throughput():
    low, high = levels.interval(100.0, [95.0, 105.0, 95.0, 105.0])
    assert low * high == pytest.approx(100**2, rel=1e-4)
    assert high == pytest.approx(100 * math.exp(3.18245 * np.std(np.log([95, 105] * 2), ddof=1) / 2), rel=1e-4)
    assert levels.interval(100.0, [95.0]) == (None, None) == levels.interval(None, [1.0, 2.0])


# --- plateau


def level(concurrency, tok_s, spread=0.01, waves=4, running=None, waiting=0, **server):
    rates = [tok_s * (1 + spread * (-1) ** wave) for wave in range(waves)]
    known = {"running_max": running, "waiting_max": waiting, "kv_usage_max": 0.1, "preemptions": 0} | server
    found = {"concurrency": concurrency, "output_tok_s": tok_s, "wave_tok_s": rates, "void": False, "server": known}
    return found | {"e2e_ms": {"mean": 1000 * concurrency / tok_s}, "client": {"limited": False}}


def test_plateau_and_its_cause():
    found = plateau.plateau([level(4, 300), level(8, 580), level(16, 900), level(32, 905, running=16, waiting=16)])
    assert (found["verdict"], found["concurrency"], found["output_tok_s"]) == ("plateau", 16, 900)
    assert found["cause"].startswith("max-num-seqs: never more than 16 ran at C=32")
    assert [step["says"] for step in found["doublings"]] == ["gain", "gain", "no gain"]


def test_the_smallest_concurrency_from_which_no_doubling_helps():
    found = plateau.plateau([level(8, 580), level(16, 900), level(32, 910), level(64, 890)])
    assert (found["verdict"], found["concurrency"]) == ("plateau", 16)


def test_still_rising():
    published = {1: 112.7, 2: 194.5, 4: 311.7, 8: 572, 16: 947.7, 32: 1358, 64: 1854.9, 128: 2534}
    found = plateau.plateau([level(c, rate) for c, rate in published.items()])
    assert (found["verdict"], found["concurrency"]) == ("still rising", 128)


def test_cannot_tell():
    assert plateau.plateau([])["verdict"] == "cannot tell"
    assert plateau.plateau([level(8, 500)])["verdict"] == "cannot tell"
    noisy = plateau.plateau([level(8, 500, spread=0.3), level(16, 520, spread=0.3)])
    assert noisy["verdict"] == "cannot tell" and "95 %" in noisy["why"]
    single = plateau.plateau([level(8, 500, waves=1), level(16, 900, waves=1)])
    assert single["verdict"] == "cannot tell" and "one wave" in single["why"]


def test_what_would_settle_it():
    noisy, clear = (plateau.plateau([level(8, 500, spread=0.3), level(16, to, spread=0.3)]) for to in (600, 750))
    assert "waves a level (requests per slot x repeats; now 4) would settle it" in noisy["why"]
    assert int(noisy["why"].split("about ")[1].split()[0]) > int(clear["why"].split("about ")[1].split()[0])
    nearly = plateau.plateau([level(8, 500, spread=0.3), level(16, 526, spread=0.3)])
    assert "more than 400 waves" in nearly["why"]
    single = plateau.plateau([level(8, 500, waves=1), level(16, 900, waves=1)])
    assert "2 requests per slot" in single["why"]


@pytest.mark.parametrize(
    ("gain", "noise", "verdict", "share"),
    [(1.0, 0.05, "plateau", 0.85), (0.95, 0.05, "plateau", 0.95), (1.3, 0.05, "still rising", 0.95)]
    + [(1.05, 0.02, "cannot tell", 0.9)],
)
def test_verdicts_of_simulated_sweeps(gain, noise, verdict, share):
    """Eight levels of four waves that rise up to C=16 and then by `gain`: how often the verdict is right."""
    source, right = np.random.default_rng(3), 0
    for _ in range(100):
        levels, rate = [], 100.0
        for concurrency in (1, 2, 4, 8, 16, 32, 64, 128):
            waves = rate * np.exp(source.normal(0, noise, 4))
            one = level(concurrency, float(np.exp(np.log(waves).mean())))
            levels.append(one | {"wave_tok_s": list(waves)})
            rate *= 1.6 if concurrency < 16 else gain
        right += plateau.plateau(levels)["verdict"] == verdict
    assert right / 100 >= share


def test_a_level_that_gains_denies_the_plateau_below_it():
    found = plateau.plateau([level(8, 500), level(16, 700), level(32, 500)])
    assert (found["verdict"], found["concurrency"]) == ("plateau", 16)


def test_limited_and_void_levels_are_not_used():
    limited, void = level(32, 905), level(64, 5000)
    limited["client"]["limited"], void["void"] = True, True
    found = plateau.plateau([level(8, 580), level(16, 900), limited, void])
    assert (found["verdict"], found["concurrency"]) == ("still rising", 16)
    assert found["cause"].startswith("the client")


@pytest.mark.parametrize(
    ("server", "word"),
    [
        ({"preemptions": 7}, "preemptions: 7"),
        ({"waiting": 3, "running": 9, "kv_usage_max": 0.97}, "KV cache: 97%"),
        ({"waiting": None}, "no metrics"),
        ({"running": 32}, "the engine"),
    ],
)
def test_causes(server, word):
    assert word in plateau.cause(level(16, 900), level(32, 900, **server))


def test_the_interval_of_a_gain_covers_the_truth():
    """95 % intervals over four waves a level; a plain bootstrap would cover some 85 %."""
    source, hits = np.random.default_rng(2), 0
    for _ in range(400):
        low, high = level(8, 500), level(16, 750)
        for each, mean in ((low, 500), (high, 750)):
            each["wave_tok_s"] = list(mean * np.exp(source.normal(0, 0.05, 4)))
            each["output_tok_s"] = math.exp(np.log(each["wave_tok_s"]).mean())
        _, below, above = plateau.gain(low, high)
        hits += below <= 0.5 <= above
    assert 0.91 <= hits / 400 <= 0.99


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_gain_of_nothing_is_seldom_called_a_gain(seed):
    source = np.random.default_rng(seed)
    low, high = level(8, 500), level(16, 500)
    for each in (low, high):
        each["wave_tok_s"] = list(500 * np.exp(source.normal(0, 0.005, 4)))
    assert plateau.judge(*plateau.gain(low, high)[1:]) != "gain"


# --- prompts, arrivals, SLO, counters


def test_prompts_are_unique_and_come_back_with_the_seed():
    prompts = Prompts(7, 128)
    names = [(f"c{c}-r{r}", i) for c in (1, 8) for r in (0, 1) for i in range(40)]
    made = [tuple(prompts.make(*name)) for name in names]
    assert len({prompt[:16] for prompt in made}) == len(names)
    assert made == [tuple(Prompts(7, 128).make(*name)) for name in names]
    assert made[0] != tuple(Prompts(8, 128).make(*names[0]))
    assert all(len(prompt) == 128 for prompt in made)


def test_chat_prompts_are_calibrated_by_the_servers_count():
    prompts = Prompts(7, 100, "chat")
    count = lambda: 9 + len(prompts.make("x").split())  # noqa: E731  a chat template of nine tokens
    assert not prompts.calibrate(count())
    assert prompts.calibrate(count())
    assert count() == 100


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999999"])
def test_bad_urls_are_usage_errors(url):
    with pytest.raises(UsageError):
        Target(url, "m")


def test_the_key_and_the_path_are_in_the_request():
    head = Target("https://h:8443/prefix/v1/", "m", "chat", "secret").request("hi", 4, "id").split(b"\r\n")
    assert head[0] == b"POST /prefix/v1/chat/completions HTTP/1.1"
    assert b"authorization: Bearer secret" in head and b"host: h:8443" in head


@pytest.mark.parametrize("slo", ["ttft", "ttft=x", "speed=3", "ttft=-1", 5, "ttft=0"])
def test_bad_slos(slo):
    with pytest.raises(UsageError):
        metrics.parse_slo(slo)


def test_slos():
    assert (
        metrics.parse_slo("ttft=500, tpot=30")
        == {"ttft": 500, "tpot": 30}
        == metrics.parse_slo({"ttft": 500, "tpot": 30})
    )
    assert metrics.parse_slo("") == {}


def test_poisson_arrivals():
    due = poisson(50, 200, "seed")
    assert due == poisson(50, 200, "seed") and due == sorted(due)
    assert abs(len(due) - 10_000) < 4 * math.sqrt(10_000)
    gaps = np.diff(due) / 1e9
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    assert len(poisson(0.001, 1, "seed")) == 1


def test_counters_and_crosscheck():
    scrape = counters.Counters("http://localhost:1")
    scrape._first = {"vllm:generation_tokens_total": [({}, 10.0)], "vllm:time_to_first_token_seconds_sum": [({}, 1.0)]}
    scrape._first |= {
        "vllm:time_to_first_token_seconds_count": [({}, 10.0)],
        "vllm:prefix_cache_queries_total": [({}, 0.0)],
    }
    scrape._first |= {"vllm:prefix_cache_hits_total": [({}, 0.0)]}
    scrape._last = {"vllm:generation_tokens_total": [({"engine": "0"}, 60.0), ({"engine": "1"}, 50.0)]}
    scrape._last |= {
        "vllm:time_to_first_token_seconds_sum": [({}, 2.0)],
        "vllm:time_to_first_token_seconds_count": [({}, 20.0)],
    }
    scrape._last |= {"vllm:prefix_cache_queries_total": [({}, 1000.0)], "vllm:prefix_cache_hits_total": [({}, 16.0)]}
    figures = scrape.figures()
    assert (figures["tokens"], figures["ttft_ms"], figures["itl_ms"], figures["preemptions"]) == (100, 100, None, None)
    assert counters.prefix_hit_rate(figures) == 0.016
    check = counters.crosscheck({"tokens": 100, "ttft_ms": 107.0, "itl_ms": 5.0}, figures)
    assert check["tokens"]["agrees"] and check["ttft_ms"]["agrees"] is False and check["itl_ms"]["agrees"] is None
    assert check["ttft_ms"]["difference_percent"] == pytest.approx(7)
