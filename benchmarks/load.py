"""Load clients against a server whose true times are known, in one run; read the error columns, nearer 0 is better.

    python benchmarks/load.py [--concurrency 1,8,128] [--vllm BIN] [--guidellm BIN] [--aiperf BIN] [--tokenizer DIR]
    python benchmarks/load.py --server URL --model M --vllm BIN --tokenizer DIR [--concurrency 1,8] [--together]

Each client drives the truth server (12 ms a token, TTFT 50 ms, 64 tokens out) in a closed loop. Errors are the
client's own figure / the server's log - 1, over the same requests; in flight is true (from the log), as a share of C;
CPU is user + system of the client, in us a token (the other tools: the whole tool, start-up too). The floor is the
least that Python can do on this machine in the same minutes: a wait, one read with its kernel stamp, one append. A
tool that is not given is left out. vllm comes with the embedded server (.venv-vllm/bin/vllm), guidellm and aiperf from
PyPI.

With --server, k25 and vllm bench serve load that server in turns, the same number of requests of the same lengths, all
of them counted; the difference of the two (k25 / vllm - 1) is paired by round, with its 95 % interval (Student's t).
With --together they do so at the same time: both see the same steps of the server, and a noisy machine cancels out.
"""

import argparse
import gc
import json
import multiprocessing
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from scipy.special import stdtrit

from k25lib.client import Client
from k25lib.load import priority
from k25lib.load.connection import READ_BYTES, SO_TIMESTAMPNS, STAMP_SPACE
from k25lib.load.prompts import Prompts, Target
from k25lib.load.selftest import ITL_MS, OUTPUT_TOKENS, TTFT_MS, fidelity, true_times, truth_server
from k25lib.load.sweep import sweep

INPUT_TOKENS = 64
COLUMNS = ("client", "C", "TPOT mean err %", "TPOT p99 err %", "TTFT p50 err %", "in flight %", "CPU us/token")
FLOOR = "floor us/token"


def vllm(args, url, concurrency, number, folder):
    """The command of `vllm bench serve` and how to read its figures: (tpot mean, tpot p99, ttft p50) in ms."""
    command = [args.vllm, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", args.model]
    command += ["--tokenizer", args.tokenizer, "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--num-prompts", str(number)]
    command += ["--max-concurrency", str(concurrency), "--save-result", "--result-dir", folder]
    command += ["--result-filename", "out.json", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"]
    command += ["--seed", str(time.time_ns() % 2**31)]

    def read():
        found = json.loads((Path(folder) / "out.json").read_text())
        return found["mean_tpot_ms"], found["p99_tpot_ms"], found["p50_ttft_ms"]

    return command, read


def guidellm(args, url, concurrency, number, folder):
    """The same for guidellm; what it calls ITL is TPOT here."""
    command = [args.guidellm, "run", "--disable-console", "--profile", f"kind=concurrent,streams={concurrency}"]
    command += ["--backend", f"kind=openai_http,target={url},model=truth,request_format=/v1/completions"]
    command += ["--constraint", f"kind=max_requests,count={number}"]
    command += ["--tokenizer", f"kind=hf_auto,model={args.tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={folder}/out.json"]

    def read():
        metrics = json.loads(next(Path(folder).glob("*.json")).read_text())["benchmarks"][0]["metrics"]
        tpot, ttft = (metrics[name]["successful"] for name in ("inter_token_latency_ms", "time_to_first_token_ms"))
        return tpot["mean"], tpot["percentiles"]["p99"], ttft["percentiles"]["p50"]

    return command, read


def aiperf(args, url, concurrency, number, folder):
    """The same for aiperf; what it calls ITL is TPOT here."""
    command = [args.aiperf, "profile", "-m", "truth", "-u", url, "--endpoint-type", "completions", "--streaming"]
    command += ["--tokenizer", args.tokenizer, "--concurrency", str(concurrency), "--request-count", str(number)]
    command += ["--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS)]
    command += [
        "--extra-inputs",
        "ignore_eos:true",
        "--use-server-token-count",
        "--artifact-dir",
        folder,
        "--ui-type",
        "none",
    ]

    def read():
        found = json.loads(next(Path(folder).rglob("*aiperf.json")).read_text())
        tpot, ttft = found["inter_token_latency"], found["time_to_first_token"]
        return tpot["avg"], tpot["p99"], ttft["p50"]

    return command, read


def tool(name, args, concurrency, rounds):
    """One row for another tool: its own figures beside the log of the requests it sent."""
    with truth_server() as url, tempfile.TemporaryDirectory() as folder:
        command, read = globals()[name](args, url, concurrency, concurrency * rounds, folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        log = [(arrived, sends) for arrived, sends in true_times(url).values() if len(sends) == OUTPUT_TOKENS]
        try:
            figures = read()
        except (OSError, StopIteration, KeyError, ValueError) as error:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            return [name, concurrency, f"failed: {error!r} {' '.join(last)[:120]}"]
    tpot = np.array([(sends[-1] - sends[0]) / (OUTPUT_TOKENS - 1) / 1e6 for _, sends in log])
    ttft = np.array([(sends[0] - arrived) / 1e6 for arrived, sends in log])
    truth = tpot.mean(), np.quantile(tpot, 0.99), np.median(ttft)
    starts, ends = np.sort([arrived for arrived, _ in log]), np.array([sends[-1] for _, sends in log])
    window = starts[concurrency - 1], starts[-1]  # every slot has sent, and there is more to send
    busy = sum(
        max(0, min(end, window[1]) - max(arrived, window[0])) for (arrived, _), end in zip(log, ends, strict=True)
    )
    share = busy / (window[1] - window[0]) / concurrency * 100 if window[1] > window[0] else float("nan")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    errors = [(figure / true - 1) * 100 for figure, true in zip(figures, truth, strict=True)]
    return [name, concurrency, *errors, share, cpu_s * 1e6 / (len(log) * OUTPUT_TOKENS)]


def ours(concurrency, rounds, repeats):
    """One row for this project's client, and the floor of this machine: medians of runs in turns."""
    floors, runs = [], []
    for _ in range(repeats):
        with truth_server() as url, multiprocessing.get_context("spawn").Pool(1) as pool:
            floors.append(pool.apply(floor_us, (url, concurrency, rounds)))
        with truth_server() as url:
            runs.append(fidelity(url, concurrency, rounds - 1))
    names = [f"{name}_error_percent" for name in ("tpot_mean", "tpot_p99", "ttft_p50")]
    figures = [statistics.median(run[name] for run in runs) for name in (*names, "true_in_flight_mean")]
    figures[-1] *= 100 / concurrency
    cpu_us = statistics.median(run["cpu_us_per_token"] for run in runs)
    return ["k25", concurrency, *figures, cpu_us, statistics.median(floors)]


def floor_us(url, concurrency, rounds):
    """CPU of the least that a client in Python can do, in us a token: wait, read with a kernel stamp, append."""
    target, prompts, address = Target(url, "truth"), Prompts(0, INPUT_TOKENS), urlsplit(url)
    requests = [target.request(prompts.make(index), OUTPUT_TOKENS, str(index)) for index in range(concurrency * rounds)]
    poller, open_, live, queue = select.epoll(), {}, concurrency, iter(requests)
    for _ in range(concurrency):
        sock = socket.create_connection((address.hostname, address.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.setblocking(False)
        poller.register(sock, select.EPOLLIN)
        open_[sock.fileno()] = sock, []
    gc.freeze()
    gc.disable()
    with priority.raised():
        cpu_s = time.process_time()
        for sock, _ in open_.values():
            sock.send(next(queue))
        while live:
            for fd, _ in poller.poll():
                sock, pieces = open_[fd]
                piece = sock.recvmsg(READ_BYTES, STAMP_SPACE)
                pieces.append(piece)
                if piece[0].endswith(b"0\r\n\r\n"):
                    request = next(queue, None)
                    if request is None:
                        live -= 1
                    else:
                        sock.send(request)
        cpu_s = time.process_time() - cpu_s
    return cpu_s * 1e6 / (len(requests) * OUTPUT_TOKENS)


def beside_vllm(args, concurrency):
    """Print what k25 and `vllm bench serve` say of one server, and the difference of the two, paired by round."""
    pairs = [(together if args.together else in_turn)(args, concurrency, number) for number in range(args.repeats)]
    for index, name in enumerate(("TPOT mean", "TPOT p99", "TTFT p50")):
        k25, bench = (np.array([pair[side][index] for pair in pairs]) for side in (0, 1))
        difference = (k25 / bench - 1) * 100
        half = stdtrit(len(pairs) - 1, 0.975) * difference.std(ddof=1) / len(pairs) ** 0.5
        print(
            f"C={concurrency:<4} {name:>9}: k25 {k25.mean():9.3f} ms, vllm bench serve {bench.mean():9.3f} ms, "
            f"k25 / vllm - 1 = {difference.mean():+.2f} % (95 %: {difference.mean() - half:+.2f} to "
            f"{difference.mean() + half:+.2f}; {len(pairs)} rounds)",
            flush=True,
        )


def figures(rows):
    """(tpot mean, tpot p99, ttft p50) in ms of rows (ttft_ms, tpot_ms)."""
    ttft, tpot = np.array(rows).T
    return tpot.mean(), np.quantile(tpot, 0.99), np.median(ttft)


def k25_requests(args, concurrency):
    """(start_ns, end_ns, ttft_ms, tpot_ms) of the requests of one sweep by k25, its first ones too."""
    lengths = INPUT_TOKENS, OUTPUT_TOKENS, args.rounds
    found = sweep(args.server, args.model, [concurrency], *lengths, warmup=False, selftest=False)
    found.check()
    every = [request for request in found.runs[-1][1] if request.ok]
    return [(each.send_ns, each.end_ns, each.row["ttft_ms"], each.row["tpot_ms"]) for each in every]


@contextmanager
def vllm_requests(args, concurrency, rounds):
    """Starts `vllm bench serve`; yields it, and a function that waits for it and gives the same of its requests."""
    with tempfile.TemporaryDirectory() as folder:
        command, _ = vllm(args, args.server, concurrency, concurrency * rounds, folder)
        process = subprocess.Popen([*command, "--save-detailed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def wait():
            if process.wait(300):
                sys.exit(f"failed: {' '.join(command)}")
            found = json.loads((Path(folder) / "out.json").read_text())
            rows = []
            for start_s, ttft_s, itls_s in zip(found["start_times"], found["ttfts"], found["itls"], strict=True):
                start_ns, end_ns = start_s * 1e9, (start_s + ttft_s + sum(itls_s)) * 1e9  # its clock is monotonic too
                rows.append((start_ns, end_ns, ttft_s * 1e3, sum(itls_s) * 1e3 / (OUTPUT_TOKENS - 1)))
            return rows

        try:
            yield process, wait
        finally:
            process.kill()
            process.wait()


def in_turn(args, concurrency, number):
    """Figures of k25 and of vllm, one after the other; who is first changes from round to round."""
    found = {}
    for name in ("k25", "vllm") if number % 2 else ("vllm", "k25"):
        if name == "k25":
            found[name] = k25_requests(args, concurrency)
        else:
            with vllm_requests(args, concurrency, args.rounds) as (_, wait):
                found[name] = wait()
    return [figures([row[2:] for row in found[name]]) for name in ("k25", "vllm")]


def together(args, concurrency, number):
    """Figures of k25 and of vllm at the same time, each at this concurrency: of the requests while both were at it."""
    client = Client(args.server)
    with vllm_requests(args, concurrency, 3 * args.rounds) as (process, wait):
        while process.poll() is None and not client.metrics()["vllm:num_requests_running"][0][1]:
            time.sleep(0.3)
        both = [k25_requests(args, concurrency), wait()]
    start_ns = max(min(row[0] for row in rows) for rows in both)
    end_ns = min(max(row[1] for row in rows) for rows in both)
    return [figures([row[2:] for row in rows if start_ns <= row[0] and row[1] <= end_ns]) for rows in both]


def line(cells):
    shown = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return "  ".join(f"{cell:>{max(len(title), 8)}}" for cell, title in zip(shown, (*COLUMNS, FLOOR), strict=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,64,128,256", help="for k25; the others take --tools-concurrency")
    parser.add_argument("--tools-concurrency", default="8,128")
    parser.add_argument("--rounds", type=int, default=4, help="requests per slot")
    parser.add_argument("--repeats", type=int, default=3, help="runs of k25 and the floor (or vllm) in turns")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; the other tools need one")
    parser.add_argument("--server", metavar="URL", help="compare k25 with vllm bench serve on this server")
    parser.add_argument("--together", action="store_true", help="both at the same time in place of in turns")
    parser.add_argument("--model", default="truth", help="the model that the server serves")
    for name in ("vllm", "guidellm", "aiperf"):
        parser.add_argument(f"--{name}", metavar="BIN", help=f"the command {name}")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; {OUTPUT_TOKENS} tokens out")
    levels = [int(each) for each in args.concurrency.split(",")]
    if args.server:
        for concurrency in levels:
            beside_vllm(args, concurrency)
        return
    print(f"the truth: TTFT {TTFT_MS} ms, TPOT {ITL_MS} ms", line((*COLUMNS, FLOOR)), sep="\n", flush=True)
    for concurrency in levels:
        print(line(ours(concurrency, args.rounds, args.repeats)), flush=True)
    for name in ("vllm", "guidellm", "aiperf"):
        if getattr(args, name):
            for concurrency in map(int, args.tools_concurrency.split(",")):
                print(line(tool(name, args, concurrency, args.rounds)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
