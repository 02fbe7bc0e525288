"""Load clients against a server whose true times are known, in one run; read the error columns, nearer 0 is better.

    python benchmarks/load.py [--concurrency 1,8,128] [--vllm BIN] [--guidellm BIN] [--aiperf BIN] [--tokenizer DIR]

Each client drives the truth server (12 ms a token, TTFT 50 ms, 64 tokens out) in a closed loop. Errors are the
client's own figure / the server's log - 1, over the same requests; in flight is true (from the log), as a share of C;
CPU is user + system of the client, in us a token (the other tools: the whole tool, start-up too). A tool that is not
given is left out. vllm comes with the embedded server (.venv-vllm/bin/vllm), guidellm and aiperf from PyPI.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from k25lib.load.selftest import OUTPUT_TOKENS, TTFT_MS, fidelity, true_times, truth_server

INPUT_TOKENS = 64
COLUMNS = ("client", "C", "TPOT mean err %", "TPOT p99 err %", "TTFT p50 err %", "in flight %", "CPU us/token")


def vllm(args, url, concurrency, number, folder):
    """The command of `vllm bench serve` and how to read its figures: (tpot mean, tpot p99, ttft p50) in ms."""
    command = [args.vllm, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "truth"]
    command += ["--tokenizer", args.tokenizer, "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--num-prompts", str(number)]
    command += ["--max-concurrency", str(concurrency), "--save-result", "--result-dir", folder]
    command += ["--result-filename", "out.json", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"]

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


def ours(concurrency, rounds):
    """One row for this project's client."""
    with truth_server() as url:
        found = fidelity(url, concurrency, rounds - 1)
    errors = [found[f"{name}_error_percent"] for name in ("tpot_mean", "tpot_p99", "ttft_p50")]
    return ["k25", concurrency, *errors, found["true_in_flight_mean"] / concurrency * 100, found["cpu_us_per_token"]]


def line(cells):
    shown = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return "  ".join(f"{cell:>{max(len(title), 8)}}" for cell, title in zip(shown, COLUMNS, strict=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,64,128,256", help="for k25; the others take --tools-concurrency")
    parser.add_argument("--tools-concurrency", default="8,128")
    parser.add_argument("--rounds", type=int, default=4, help="requests per slot")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; the other tools need one")
    for name in ("vllm", "guidellm", "aiperf"):
        parser.add_argument(f"--{name}", metavar="BIN", help=f"the command {name}")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; TTFT {TTFT_MS} ms, {OUTPUT_TOKENS} tokens")
    print(line(COLUMNS), flush=True)
    for concurrency in map(int, args.concurrency.split(",")):
        print(line(ours(concurrency, args.rounds)), flush=True)
    for name in ("vllm", "guidellm", "aiperf"):
        if getattr(args, name):
            for concurrency in map(int, args.tools_concurrency.split(",")):
                print(line(tool(name, args, concurrency, args.rounds)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
