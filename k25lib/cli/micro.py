"""Commands `gemm` and `collectives`: the model's GEMMs and collectives, timed alone, as a table or JSON."""

import argparse
import shlex
import sys

from k25lib.cli import print_json
from k25lib.errors import UsageError

MOST = 1e6  # s, and GB


def add(commands):
    """Declare the commands of this module."""
    gemm = commands.add_parser("gemm", help="time the GEMMs of a decode step with the server's kernels")
    _common(gemm, "1,4,16,64", 900)
    gemm.add_argument("--tp", type=int, default=8, help="tensor parallel size that shapes are cut for (default 8)")
    gemm.add_argument("--state", default="cold,warm", help="cold, warm or both (default)")
    gemm.add_argument("--only", default="", metavar="NAMES", help="only GEMMs whose name holds one of these words")
    gemm.add_argument("--max-gb", type=_positive, help="memory for weights, GB (half a GPU, 1 on a CPU)")
    gemm.set_defaults(run=_gemm)
    collectives = commands.add_parser("collectives", help="time the collectives of a decode step")
    _common(collectives, "1,4,16,64,256", 900)
    collectives.add_argument("--world", type=int, default=2, help="ranks on this machine, one a GPU (default 2)")
    collectives.add_argument("--torchrun", default="", metavar="OPTIONS", help='as "--nnodes 2 --rdzv-endpoint H:P"')
    collectives.add_argument("--no-variants", action="store_true", help="leave out NCCL_ALGO x NCCL_PROTO")
    collectives.set_defaults(run=_collectives)


def _common(command, batches, timeout_s):
    command.add_argument("--config", default="", help="config.json of the model (default: Kimi-K2.5)")
    command.add_argument("--batch", default=batches, help=f"tokens a step, comma-separated (default {batches})")
    command.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    command.add_argument("--python", default="", help='interpreter or prefix, such as "docker exec vllm python3"')
    command.add_argument("--seconds", type=_positive, default=0.2, help="time per row, s (default 0.2)")
    command.add_argument("--timeout", type=_positive, default=timeout_s, help=f"for all rows, s (default {timeout_s})")
    command.add_argument("--row-timeout", type=_positive, help="for one row, s (default 180; collectives 60)")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _positive(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is no positive number (at most {MOST:.0e})")
    return value


def _gemm(args):
    from k25lib.micro.launch import run_gemm
    from k25lib.micro.plan import gemm_tasks

    states = [word.strip() for word in args.state.split(",") if word.strip()]
    tasks = gemm_tasks(_model(args), args.tp, _batches(args.batch), states, args.only)
    settings = _settings(args, tasks)
    if args.max_gb:
        settings["max_bytes"] = args.max_gb * 1e9
    return _run(args, "gemm", lambda on_row: run_gemm(settings, args.python, args.timeout, on_row))


def _collectives(args):
    from k25lib.micro.launch import probe, run_collectives
    from k25lib.micro.plan import collective_tasks

    if args.world < 1:
        raise UsageError(f"--world must be at least 1, not {args.world}")
    try:
        options = shlex.split(args.torchrun)
    except ValueError as error:
        raise UsageError(f"--torchrun {args.torchrun!r}: {error}") from None
    device = probe(args.python, world=args.world) if args.device == "auto" else args.device
    tasks = collective_tasks(_model(args), args.world, _batches(args.batch), device == "cuda", not args.no_variants)
    settings = _settings(args, tasks) | {"device": device, "torchrun": options}
    return _run(
        args, "collectives", lambda on_row: run_collectives(settings, args.python, args.world, args.timeout, on_row)
    )


def _run(args, schema, measure):
    rows = []

    def on_row(row):
        rows.append(row)
        print(f"{len(rows)} {_line(row)}", file=sys.stderr, flush=True)

    def show(rows):
        if args.json:
            print_json({"schema": f"k25.{schema}/1", "rows": [nested(row) for row in rows]})
        else:
            for row in rows:
                print(_line(row))

    try:
        rows = measure(on_row)
    except UsageError:
        raise
    except BaseException:  # Ctrl-C keeps what was measured
        show(rows)
        raise
    show(rows)
    return 0 if any(row["status"] == "ok" for row in rows) else 1


def nested(row):
    """A row as JSON has it: the columns `time_us_*` as one object `time_us`."""
    times = {key.removeprefix("time_us_"): value for key, value in row.items() if key.startswith("time_us_")}
    rest = {key: value for key, value in row.items() if not key.startswith("time_us_")}
    return rest | ({"time_us": times} if times else {})


def _line(row):
    if "op" in row:
        what = f"{row['op']} {row['bytes']} B x {row['calls']} {row['mode']} {row['backend']} {row['environment']}"
        speed = f"busbw {row.get('busbw_gb_s') or 0:.2f} GB/s"
    else:
        what = f"{row['name']} M={row['m']} N={row['n']} K={row['k']} {row['dtype']} {row['state']}"
        speed = f"{row.get('gb_s') or 0:.1f} GB/s, {row.get('percent_of_peak') or 0:.1f} % of {row.get('bound')} peak"
    if row["status"] != "ok":
        return f"{what}: {row['status']}: {row['reason']}"
    return f"{what}: {row['time_us_median']:.2f} us (IQR {row['time_us_iqr']:.2f}), {speed}"


def _settings(args, tasks):
    settings = {"tasks": tasks, "seconds": args.seconds}
    if args.device != "auto":
        settings["device"] = args.device
    if args.row_timeout:
        settings["row_timeout_s"] = args.row_timeout
    return settings


def _model(args):
    from k25lib.model import load_model

    if args.config:
        return load_model(args.config)
    from k25lib.run import PROJECT

    return load_model(PROJECT / "data" / "reference" / "kimi-k2.5" / "config.json")


def _batches(text):
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--batch takes whole numbers from 1, comma-separated, not {text!r}") from None
