"""Commands: the load generator (`load`)."""

import sys

from k25lib.cli import print_json
from k25lib.errors import UsageError


def add(commands):
    """Declare `k25 load`."""
    load = commands.add_parser("load", help="load a server: TTFT, TPOT, throughput against concurrency")
    load.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    load.add_argument("--model", default="", help="the served model (default: the first that the server lists)")
    load.add_argument("--concurrency", default="1,2,4,8,16,32,64,128", metavar="1,16", help="closed loop at each")
    load.add_argument("--rate", metavar="R", help="open loop (Poisson) at R requests a second, or several: 1,2,4")
    load.add_argument("--input-tokens", type=int, default=128)
    load.add_argument("--output-tokens", type=int, default=64)
    load.add_argument("--requests-per-slot", type=int, default=4, help="measured requests per slot and repeat")
    load.add_argument("--max-seconds", type=float, help="no new request of a level after this many s")
    load.add_argument("--repeats", type=int, default=1, help="repeats of each level, with new prompts")
    load.add_argument("--seed", type=int, help="of prompts and arrivals (default: random, recorded)")
    load.add_argument("--slo", help='limits in ms for goodput, such as "ttft=500,tpot=30"')
    load.add_argument("--api", default="completions", choices=("completions", "chat"))
    load.add_argument("--gpus", type=int, help="of the server, for tok/s per GPU")
    load.add_argument("--chunk-timeout", type=float, default=30, metavar="S", help="a stream silent for S s has failed")
    load.add_argument("--first-timeout", type=float, default=120, metavar="S", help="the same before its first token")
    load.add_argument("--no-warmup", action="store_true", help="measure each slot's first request too")
    load.add_argument("--no-selftest", action="store_true", help="skip the client's test of itself")
    load.add_argument("--json", action="store_true", help="print one JSON object (k25.load/1)")
    load.set_defaults(run=run_load)


def _numbers(text, kind, name):
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{name} takes numbers such as 1,16, not {text!r}") from None


def run_load(args):
    """Run the sweep; exit 1 if it stopped early (what was measured is still printed), 130 after Ctrl-C."""
    from k25lib.load.levels import HEADER, line
    from k25lib.load.plateau import sentence
    from k25lib.load.sweep import sweep

    found = sweep(
        args.url,
        args.model,
        concurrency=_numbers(args.concurrency, int, "--concurrency"),
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        requests_per_slot=args.requests_per_slot,
        max_seconds=args.max_seconds,
        seed=args.seed,
        slo=args.slo,
        rate=_numbers(args.rate, float, "--rate") if args.rate is not None else None,
        api=args.api,
        repeats=args.repeats,
        warmup=not args.no_warmup,
        selftest=not args.no_selftest,
        gpus=args.gpus,
        on_progress=lambda line: print(line, file=sys.stderr, flush=True),
        chunk_timeout_s=args.chunk_timeout,
        first_timeout_s=args.first_timeout,
    )
    if args.json:
        print_json(found.result)
    else:
        print(HEADER, *map(line, found.result["levels"]), sentence(found.result["plateau"]), sep="\n")
    if found.interrupted:
        print(f"k25: {found.error}", file=sys.stderr)
        return 130
    found.check()
    return 0
