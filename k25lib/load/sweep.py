"""Load a server at one concurrency after the other (or at given rates) and say what it did: `sweep`, and `send`."""

import math
import random
import time

from k25lib.client import Client, key_of_environment
from k25lib.errors import K25Error, UsageError
from k25lib.load.counters import Counters
from k25lib.load.drive import Driver, check_descriptors
from k25lib.load.levels import HEADER, level, line
from k25lib.load.metrics import LATENCIES, SUMMARY, Request, parse_slo
from k25lib.load.plateau import plateau
from k25lib.load.prompts import Prompts, Target, poisson
from k25lib.load.selftest import selftest as test_the_client

METHOD_VERSION = 3  # goes up when a number would change
OPEN_LOOP_SECONDS = 30.0
MOST_REQUESTS = 200_000  # of a level: all are built before it starts
MOST_TOKENS = 200_000_000  # of its prompts: some 6 bytes each, held twice


class Sweep:
    """What a sweep measured. `result` is k25.load/1; `error` is why it stopped early, None if it did not."""

    def __init__(self, result):
        self.result, self.error, self.interrupted = result, None, False
        self.runs = []  # (names of the level and repeat, requests)

    def tables(self):
        """{"requests", "chunks", "levels"}: lists of rows (dicts)."""
        requests, chunks = [], []
        for names, rows in self.runs:
            requests += [names | request.row for request in rows]
            for request in rows:
                chunks += [names | chunk for chunk in request.chunk_rows()]
        return {"requests": requests, "chunks": chunks, "levels": [_flat(each) for each in self.result["levels"]]}

    def check(self):
        """Raise K25Error if the sweep stopped early or a level had no success; what was measured stays here."""
        if self.error:
            raise K25Error(self.error)


def _flat(value, prefix=""):
    """A level as one table row: what is nested becomes columns, lists stay out."""
    row = {}
    for key, each in value.items():
        if each is None and key in LATENCIES:
            each = dict.fromkeys(SUMMARY)
        if isinstance(each, dict) and key != "errors":
            row |= _flat(each, f"{prefix}{key}_")
        elif key == "errors":
            row[key] = ", ".join(f"{kind}: {count}" for kind, count in each.items())
        elif not isinstance(each, list):
            row[prefix + key] = each
    return row


def _whole(name, values):
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be whole numbers of at least 1, not {value!r}")
    return list(values)


def send(
    url, model, requests, concurrency, input_tokens=128, output_tokens=64, api_key=None, api="completions", **more
):
    """Send exactly `requests` requests at `concurrency` (closed loop, no warm-up, no probe); their rows.

    `more`: seed, chunk_timeout_s, first_timeout_s. Raises K25Error with the first cause if none went well.
    """
    seed = more.pop("seed", None)
    _whole("requests, concurrency and tokens", (requests, concurrency, input_tokens, output_tokens))
    target = Target(url, model, api, api_key or key_of_environment())
    prompts = Prompts(random.randrange(2**32) if seed is None else seed, input_tokens, api)
    driver = Driver(target, **more)
    plan = [target.request(prompts.make("send", index), output_tokens, f"send-{index}") for index in range(requests)]
    result = driver.hold(plan, min(concurrency, requests))
    rows = [request.row for request in _read(result, output_tokens, "send", 0)]
    if driver.interrupted:
        raise KeyboardInterrupt
    if not any(row["ok"] for row in rows):
        raise K25Error(_all_failed(rows, target))
    if lost := _lost(result, target):
        raise K25Error(lost)
    return rows


def _lost(result, target):
    """That the server went away, and what that cost; None if it did not."""
    if not result["lost"]:
        return None
    cost = f"; {result['not_sent']} requests were not sent" if result["not_sent"] else ""
    return f"{target.shown} takes no more connections: {result['lost']}{cost}"


def _read(result, output_tokens, name, warmup, phase="measured"):
    requests = []
    for exchange in sorted(result["records"], key=lambda exchange: exchange["index"]):
        index = exchange["index"]
        one_phase = "warmup" if index < warmup else phase
        requests.append(Request(exchange, output_tokens, f"{name}-{index}", one_phase, result["start_ns"]))
    return requests


def _all_failed(rows, target):
    first = next((row for row in rows if not row["ok"]), None)
    cause = f"{first['kind']}: {first['error']}" if first else "none was sent"
    if first and first["kind"] in ("http_401", "http_403"):
        cause += "; set K25_API_KEY to the server's key"
    return f"all {len(rows)} requests to {target.shown} failed; the first: {cause}"


class _Sweeper:
    def __init__(self, target, settings, say):
        self.target, self.settings, self.say = target, settings, say
        self.driver = Driver(target, settings["first_timeout_s"], settings["chunk_timeout_s"])
        self.counters = Counters(target.base, settings["api_key"])
        self.prompts = Prompts(settings["seed"], settings["input_tokens"], target.api)
        self.last_said_s, self.levels_left = 0.0, 0
        self.probes, self.honest_concurrency = [], None

    def probe(self):
        """Warm the server up, and find out how prompts are given and how long they are; what was done."""
        while len(self.probes) < 5:
            name, tokens = f"probe-{len(self.probes)}", self.settings["output_tokens"]
            plan = [self.target.request(self.prompts.make(name), tokens, name)]
            self.probes += _read(self.driver.hold(plan, 1), tokens, name, 0, "probe")
            if self.driver.interrupted:
                raise KeyboardInterrupt
            request = self.probes[-1]
            row = request.row
            if row["status"] in (400, 422) and self.prompts.shape == "token ids":
                self.prompts.shape = "text"  # this server takes no token ids
            elif row["kind"] == "timeout" or row["status"] in (401, 403, 404):
                break  # more of the same would not help
            elif request.ok and self.prompts.calibrate(row["input_tokens"]):
                break
        if not request.ok:
            raise K25Error(_all_failed([request.row for request in self.probes], self.target))
        note = "random token ids"
        if self.prompts.shape == "text":
            note = f"{self.prompts.words} random words, a number found by asking the server for usage.prompt_tokens"
        return {"shape": self.prompts.shape, "note": note, "probe_tokens": request.row["input_tokens"]}

    def run(self, concurrency, rate, repeat):
        """One repeat of one level: (requests, worker's result, server's figures)."""
        settings = self.settings
        name = f"c{concurrency}-r{repeat}" if rate is None else f"rate{rate:g}-r{repeat}"
        due_ns, warmup = None, 0
        if rate is None:
            warmup = concurrency if settings["warmup"] else 0
            number = warmup + concurrency * settings["requests_per_slot"]
        else:
            due_ns = poisson(rate, settings["max_seconds"] or OPEN_LOOP_SECONDS, f"{settings['seed']}:{name}")
            number, concurrency = len(due_ns), min(64, len(due_ns))
        plan = [
            self.target.request(self.prompts.make(name, index), settings["output_tokens"], f"{name}-{index}")
            for index in range(number)
        ]
        began_s, limit = time.monotonic(), settings["max_seconds"] if rate is None else None

        def tick(done, in_flight):
            self.counters.tick()
            if time.monotonic() - self.last_said_s > 5 and done:
                self.last_said_s = time.monotonic()
                took_s = self.last_said_s - began_s
                left_s = min(took_s / done * (number - done), (limit or math.inf) - min(took_s, limit or 0))
                left_s += self.later_s(took_s * concurrency / done)
                self.say(f"{name}: {done} of {number} requests done, {in_flight} in flight, about {left_s:.0f} s left")

        self.counters.before()
        result = self.driver.hold(plan, concurrency, warmup, due_ns, limit, tick)

        def read():
            self.counters.after()
            return _read(result, settings["output_tokens"], name, warmup), result, self.counters.figures()

        return self.keep(read)

    def keep(self, call):
        """What `call` returns, called again if Ctrl-C came meanwhile: what was measured is not lost."""
        try:
            return call()
        except KeyboardInterrupt:
            if self.driver.interrupted:
                raise
            self.driver.interrupted = True
            return call()

    def later_s(self, request_s):
        """About how long the levels after this one take, if a request takes `request_s` there."""
        if self.settings["max_seconds"]:
            return self.levels_left * self.settings["max_seconds"]
        return self.levels_left * (self.settings["requests_per_slot"] + self.settings["warmup"]) * request_s


def sweep(
    url,
    model="",
    concurrency=(1, 2, 4, 8, 16, 32, 64, 128),
    input_tokens=128,
    output_tokens=64,
    requests_per_slot=4,
    max_seconds=None,
    seed=None,
    slo=None,
    rate=None,
    api="completions",
    api_key=None,
    repeats=1,
    warmup=True,
    selftest=True,
    gpus=None,
    on_progress=None,
    chunk_timeout_s=30,
    first_timeout_s=120,
):
    """Measure every level; returns a Sweep (also after Ctrl-C, and when the server goes away half-way).

    Raises UsageError for bad values, and K25Error if the server can't be reached or its first request fails.
    `rate` (requests/s, one or several) makes it an open loop in place of `concurrency`. `on_progress` takes a line.
    """
    levels = sorted(set(_whole("concurrency", concurrency)))
    _whole("tokens, requests per slot and repeats", (input_tokens, output_tokens, requests_per_slot, repeats))
    rates = [] if rate is None else [rate] if isinstance(rate, (int, float)) else list(rate)
    if not all(type(each) in (int, float) and 0 < each < math.inf for each in rates):
        raise UsageError(f"a rate is a positive number of requests a second, not {rate!r}")
    rates = sorted(set(rates))
    if not rates and not levels:
        raise UsageError("give at least one concurrency")
    _whole("gpus", [] if gpus is None else [gpus])
    for value in (max_seconds, chunk_timeout_s, first_timeout_s):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"max seconds and time-outs are positive numbers of seconds, not {value!r}")
    seconds = max_seconds or OPEN_LOOP_SECONDS
    if rates and rates[0] * seconds < 1:
        raise UsageError(f"{rates[0]:g} requests/s make none in {seconds:g} s: give a higher rate or more seconds")
    most = rates[-1] * seconds if rates else levels[-1] * (requests_per_slot + 1)
    if most > MOST_REQUESTS:
        raise UsageError(
            f"{most:.6g} requests in a level are more than {MOST_REQUESTS}: give fewer requests or seconds"
        )
    if most * input_tokens > MOST_TOKENS:
        raise UsageError(
            f"{most:.6g} prompts of {input_tokens} tokens in a level are more than {MOST_TOKENS:.0e} tokens, which are "
            "built before it starts: give fewer requests or shorter prompts"
        )
    check_descriptors(max(levels, default=1))
    api_key = api_key or key_of_environment()
    settings = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_slot": requests_per_slot,
        "max_seconds": max_seconds,
        "seed": random.randrange(2**32) if seed is None else seed,
        "slo": parse_slo(slo),
        "api": api,
        "repeats": repeats,
        "warmup": bool(warmup),
        "gpus": gpus,
        "chunk_timeout_s": chunk_timeout_s,
        "first_timeout_s": first_timeout_s,
    }
    say = on_progress or (lambda line: None)
    target = Target(url, model, api, api_key)
    sweeper = _Sweeper(target, settings | {"api_key": api_key}, say)
    target.model = model or Client(target.base, api_key=api_key).model()
    result = {"schema": "k25.load/1", "method": METHOD_VERSION, "url": target.shown, "model": target.model}
    result |= {"settings": settings, "selftest": None, "prompts": None, "levels": [], "plateau": None}
    found = Sweep(result)
    try:
        if selftest:
            result["selftest"] = test_the_client(max(levels) if not rates else 1, say)
            sweeper.honest_concurrency = result["selftest"]["honest_concurrency"]
        say("probing the server with one request")
        result["prompts"] = sweeper.probe()
        found.runs.append(({"concurrency": 1, "rate": None, "repeat": 0}, sweeper.probes))
        _measure(found, sweeper, [(each, None) for each in levels] if not rates else [(None, each) for each in rates])
    except KeyboardInterrupt:
        found.interrupted = True
    found.interrupted |= sweeper.driver.interrupted
    if found.interrupted:
        found.error = f"interrupted; levels kept: {len(result['levels'])} (the last one as far as it came)"
    result["plateau"] = plateau(result["levels"])
    result["complete"], result["error"] = found.error is None, found.error
    return found


def _measure(found, sweeper, wanted):
    result, settings = found.result, sweeper.settings
    sweeper.say(HEADER)
    for index, (concurrency, rate) in enumerate(wanted):
        runs = []
        for repeat in range(settings["repeats"]):
            sweeper.levels_left = (len(wanted) - index - 1) * settings["repeats"] + settings["repeats"] - repeat - 1
            try:
                runs.append(sweeper.run(concurrency, rate, repeat))
            except K25Error as error:  # the server is gone: what was measured stays
                found.error = str(error)
                break
            found.runs.append(({"concurrency": concurrency, "rate": rate, "repeat": repeat}, runs[-1][0]))
            found.error = _lost(runs[-1][1], sweeper.target)
            if sweeper.driver.interrupted or found.error:
                break
        if any(requests for requests, _, _ in runs):
            figures = (runs, concurrency, rate, settings["slo"], settings["gpus"], sweeper.honest_concurrency)
            each = sweeper.keep(lambda figures=figures: level(*figures))
            result["levels"].append(each)
            sweeper.say(line(each))
        if sweeper.driver.interrupted or found.error:
            return
        if not any(request.ok for requests, _, _ in runs for request in requests):
            rows = [request.row for requests, _, _ in runs for request in requests]
            found.error = _all_failed(rows, sweeper.target)
            return
