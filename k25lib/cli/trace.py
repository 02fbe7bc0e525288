"""Commands: `k25 breakdown` (where a decode step's time goes) and `k25 slice` (one step as a file for Perfetto)."""

import collections
import gc
import os
import sys

from k25lib.cli import print_json


def add(commands):
    """Declare the commands of this module."""
    breakdown = commands.add_parser("breakdown", help="where the time of a decode step goes, from profiler traces")
    breakdown.add_argument(
        "paths", nargs="+", metavar="PATH", help="traces (of torch.profiler, or nsys as SQLite), or a folder"
    )
    breakdown.add_argument("--group", choices=("fine", "operation", "role"), default="fine", help="grouping of kernels")
    breakdown.add_argument(
        "--categories", metavar="FILE.toml", help="rules of your own, tried before the built-in ones"
    )
    breakdown.add_argument("--session", type=int, metavar="N", help="which session of the folder (default: the newest)")
    breakdown.add_argument("--config", metavar="CONFIG.json", help="the model's config.json: expected calls per step")
    breakdown.add_argument("--tp", type=int, metavar="N", help="tensor parallel size (default: as the traces tell)")
    breakdown.add_argument("--json", action="store_true", help="print one JSON object")
    breakdown.set_defaults(run=_breakdown)
    cut = commands.add_parser("slice", help="one decode step of all ranks as a small file for Perfetto")
    cut.add_argument("paths", nargs="+", metavar="CAPTURE", help="trace files, or a folder of one capture")
    cut.add_argument("--step", type=int, default=0, metavar="N", help="number of the decode step, from 0 (default 0)")
    cut.add_argument("-o", "--output", required=True, metavar="OUT.json.gz", help="the file to write")
    cut.set_defaults(run=_slice)


def _breakdown(args):
    gc.disable()  # a short process whose data are columns: collecting would only cost time
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's thread pool costs more than all sums here
    from k25lib.trace.breakdown import breakdown, census, expected_calls
    from k25lib.trace.files import find_files

    files, _ = find_files(args.paths)
    megabytes = sum(path.stat().st_size for path in files if path.exists()) / 1e6
    if megabytes > 30:
        print(f"k25: reading {len(files)} files, {megabytes:.0f} MB ...", file=sys.stderr)
    result = breakdown(args.paths, group=args.group, categories=args.categories, session=args.session)
    if args.config and result["per_step"]:
        result["census"] = census(result, expected_calls(result, args.config, args.tp))
    _tell(result["losses"])
    if args.json:
        del result["passes"]
        print_json(result)
    else:
        print("\n".join(_lines(result)))


def _tell(losses):
    for loss in losses:
        print(f"k25: {loss['kind']} ({loss['count']}), {loss['file']}: {loss['detail']}", file=sys.stderr)


def _plain(name):
    """A name of any file on one line of a terminal, without its control characters."""
    return "".join(c if c.isprintable() else "?" for c in name[:90])


def _lines(result):
    capture, counts = result["capture"], result["steps"]
    yield f"{capture['note']}; {capture['files']} files, ranks {capture['ranks']} of {capture['world_size']}"
    for row in result.get("session_totals", [])[:40]:
        numbers = f"{row['ms']:12.3f} ms {row['calls']:9} calls  {row['category']:16}"
        yield f"rank {row['rank']} {numbers} {_plain(row['name'])}"
    if capture["kind"] == "table":
        return
    kinds = ("decode", "decode_eager", "prefill", "mixed", "dummy", "partial", "empty")
    passes = ", ".join(f"{counts[k]} {k}" for k in kinds if counts[k])
    if not result["per_step"]:
        yield f"passes: {passes or 'none'} (by {counts['found_by']}); below: means per pass, as no step is decode"
        for row in result["by_kind"]:
            yield (
                f"rank {row['rank']} {row['kind']}: {row['passes']} passes, {row['kernels']:.1f} kernels, "
                f"sum {row['kernel_sum_ms']:.3f} ms, busy {row['busy_ms']:.3f}, span {row['span_ms']:.3f}"
            )
        return
    yield f"passes: {passes} (by {counts['found_by']}); below: means per {counts['measured']} step, times in ms"
    yield (
        f"\n{'rank':>4} {'batch':>6} {'steps':>6} {'kernels':>9} {'sum':>8} {'busy':>8} {'span':>8} {'interval':>9} "
        f"{'idle in graphs':>15} {'between launches':>17} {'copies':>8}"
    )
    batches = collections.Counter(row["rank"] for row in result["per_step"])
    for row in result["per_step"]:
        if row["batch"] == "all" and batches[row["rank"]] == 2:  # the same as its only batch
            continue
        gap = "-" if row["interval_ms"] is None else f"{row['interval_ms']:.3f}"
        yield (
            f"{row['rank']:>4} {row['batch']:>6} {row['steps']:>6} {row['kernels']:>9.1f} {row['kernel_sum_ms']:>8.3f} "
            f"{row['busy_ms']:>8.3f} {row['span_ms']:>8.3f} {gap:>9} {row['idle_in_graph_ms']:>15.3f} "
            f"{row['idle_in_step_ms']:>17.3f} {row['copies_ms']:>8.3f}"
        )
    for rank in sorted(set(capture["ranks"])):
        yield f"\nrank {rank}              calls         ms       %  exposed ms"
        for row in result["categories"]:
            if row["rank"] == rank and row["batch"] == "all":
                numbers = f"{row['calls']:9.2f} {row['ms']:10.4f} {row['percent']:7.2f} {row['exposed_ms']:11.4f}"
                yield f"{row['category']:17} {numbers}"
    yield ""
    for row in result["unknown"]:
        yield f"unknown: {row['ms']:.4f} ms, {row['calls']:.2f} calls: {_plain(row['name'])}"
    for row in result["collectives"]:
        split = "waiting cannot be told from one rank"
        if row["wait_ms"] is not None:
            split = f"{row['transfer_ms']:.4f} ms transfer, {row['wait_ms']:.4f} ms waiting"
        yield f"{row['op']}: {row['calls']:.2f} calls, {row['ms']:.4f} ms: {split}"
    for row in result["census"]:
        if row["expected"] is not None:
            mark = "" if "difference" not in row else f"   {row['difference']:+.2f}"
            yield f"census: {row['operation']} {row['counted']:.2f} counted, {row['expected']:.2f} expected{mark}"


def _slice(args):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from k25lib.trace.slice import cut

    losses = []
    events = cut(args.paths, args.step, args.output, losses)
    _tell(losses)
    print(f"{args.output}: {events} events of decode step {args.step}; open it in https://ui.perfetto.dev")
