"""Commands: `k25 breakdown` (where a decode step's time goes) and `k25 slice` (one step as a file for Perfetto)."""

import os
import sys


def add(commands):
    """Declare the commands of this module."""
    breakdown = commands.add_parser("breakdown", help="where the time of a decode step goes, from profiler traces")
    breakdown.add_argument("paths", nargs="+", metavar="PATH", help="trace files, or a folder of one capture")
    breakdown.add_argument("--group", choices=("fine", "operation", "role"), default="fine", help="grouping of kernels")
    breakdown.add_argument(
        "--categories", metavar="FILE.toml", help="rules of your own, tried before the built-in ones"
    )
    breakdown.add_argument("--session", type=int, metavar="N", help="which session of the folder (default: the newest)")
    breakdown.add_argument("--json", action="store_true", help="print one JSON object")
    breakdown.set_defaults(run=_breakdown)


def _breakdown(args):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's thread pool costs more than the whole sum here
    from k25lib.cli import print_json
    from k25lib.trace.breakdown import breakdown

    result = breakdown(args.paths, group=args.group, categories=args.categories, session=args.session)
    if args.json:
        del result["passes"]
        print_json(result)
    else:
        print(result)
    sys.stdout.flush()
