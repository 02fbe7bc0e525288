"""`k25 shapes`: what one rank multiplies, reads and exchanges in a decode step, from a model's config.json."""

from k25lib.cli import print_json
from k25lib.errors import UsageError


def add(commands):
    """Declare the commands of this module."""
    shapes = commands.add_parser("shapes", help="GEMMs, collectives and bytes of one decode step on one rank")
    shapes.add_argument("config", metavar="CONFIG.json", help="a model's config.json, or the folder that holds it")
    shapes.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    shapes.add_argument("--batch", type=int, default=1, help="requests in the step, M (default 1)")
    shapes.add_argument("--context", type=int, default=0, metavar="S", help="tokens in each request's KV cache")
    shapes.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="the KV cache's type")
    shapes.add_argument("--expert-parallel", action="store_true", help="whole experts, spread over the ranks")
    shapes.add_argument("--data-parallel", type=int, default=1, metavar="N", help="data parallel size (default 1)")
    shapes.add_argument(
        "--override", action="append", default=[], metavar="KEY=N", help="replace a number of the config"
    )
    peak = shapes.add_mutually_exclusive_group()
    peak.add_argument("--hardware", metavar="NAME", help="a GPU by name (default: this machine's, else RTX PRO 6000)")
    peak.add_argument("--dram-gb-s", type=float, metavar="X", help="a memory bandwidth instead, in 10^9 bytes/s")
    peak.add_argument("--measure", action="store_true", help="measure this device's bandwidth instead")
    shapes.add_argument("--json", action="store_true", help="print one JSON object")
    shapes.set_defaults(run=run_shapes)


def run_shapes(args):
    """Print the shapes; exit code 0."""
    from k25lib.model import load_model
    from k25lib.model.config import read_config

    overrides = dict(_override(text) for text in args.override)
    if unknown := [key for key in overrides if key not in read_config(args.config).text]:
        raise UsageError(f"--override {unknown[0]}: {args.config} has no such key to replace")
    model = load_model(args.config, overrides)
    step = model.step(args.tp, args.batch, args.context, args.expert_parallel, args.data_parallel, args.kv_dtype)
    hardware, assumed = _hardware(args)
    result = {
        "schema": "k25.shapes/1",
        "architecture": model.architecture,
        "tp": args.tp,
        "batch": args.batch,
        "context": args.context,
        "gemms": step.gemms,
        "collectives": step.collectives,
        "norm_bytes": step.norm_bytes,
        "touched_experts": step.touched_experts,
        "weight_bytes_read_per_step": step.weight_bytes,
        "kv_bytes_per_token": step.kv_bytes_per_token,
        "kv_bytes_read_per_step": step.kv_bytes,
        "ideal_step_ms": step.ideal_ms(hardware.dram_gb_s),
        "hardware": {**hardware.as_dict(), "assumed": assumed},
        "parameters": model.parameters(),
    }
    if args.json:
        print_json(result)
    else:
        print(_text(result, step, hardware, assumed))
    return 0


def _override(text):
    key, _, value = text.partition("=")
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"--override {text}: give KEY=N with a whole number")
    return key, int(value)


def _hardware(args):
    """The device that bounds the step, and whether it was assumed rather than named or found."""
    from k25lib import hardware
    from k25lib.environment import gpus

    if args.measure:
        return hardware.measure(), False
    if args.dram_gb_s is not None:
        if not 0 < args.dram_gb_s < float("inf"):
            raise UsageError("--dram-gb-s must be a positive number")
        return hardware.Hardware("given", args.dram_gb_s, source="--dram-gb-s"), False
    if args.hardware:
        found = hardware.find(args.hardware)
        if found is None:
            names = ", ".join(device.name for device in hardware.known())
            raise UsageError(
                f"hardware {args.hardware!r} is not listed; known: {names}; or give --dram-gb-s, --measure"
            )
        return found, False
    local = next((hardware.find(gpu["name"] or "") for gpu in gpus()), None)
    return (local, False) if local else (hardware.find(hardware.REFERENCE), True)


def _text(result, step, hardware, assumed):
    row = "{:<18} {:>7} {:>6} {:>9} {:<5} {:>6} {:<11} {:>10} {:>10}"
    lines = [
        f"{result['architecture']}, one rank of TP={step.tp}, {step.batch} requests, {step.context} tokens of context",
        "",
        row.format("GEMM", "N", "K", "matrices", "dtype", "calls", "sharding", "MB/call", "MB/step"),
    ]
    for gemm in step.gemms:
        lines.append(
            row.format(
                gemm["name"],
                gemm["n"],
                gemm["k"],
                f"{gemm['matrices']:.4g}",
                gemm["dtype"],
                gemm["calls_per_step"],
                gemm["sharding"],
                f"{gemm['bytes_per_call'] / 1e6:.3f}",
                f"{gemm['bytes_per_step'] / 1e6:.1f}",
            )
        )
    lines += ["", "{:<14} {:>10} {:>6}  {}".format("collective", "bytes", "calls", "where")]
    lines += [f"{c['op']:<14} {c['bytes']:>10} {c['calls_per_step']:>6}  {c['where']}" for c in step.collectives]
    peak = "measured" if hardware.measured else "peak"
    lines += [
        "",
        f"weights and norms   {step.weight_bytes / 1e9:.3f} GB a step (norms {step.norm_bytes / 1e6:.1f} MB)",
        f"KV cache            {step.kv_bytes_per_token} bytes a token, {step.kv_bytes / 1e9:.3f} GB a step",
        f"bandwidth bound     {result['ideal_step_ms']:.3f} ms at {hardware.dram_gb_s / 1e3:.3f} TB/s "
        f"({hardware.name}, {peak}{', assumed: name yours with --hardware' if assumed else ''})",
    ]
    return "\n".join(lines)
