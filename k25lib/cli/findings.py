"""`k25 compare`: what changed between two runs, for readers and for CI."""

import sys
import textwrap

from k25lib.cli import print_json
from k25lib.errors import UsageError

WORSE = 3


def add(commands):
    """Declare the commands of this module."""
    compare = commands.add_parser(
        "compare",
        help="what changed between runs, with interval and verdict",
        description="Compare B with A. Each is a run (a directory, a name below data/runs, or `newest`), several "
        "restarts of one configuration separated by commas, or a campaign's name, which stands for all its runs. "
        "Exit code 3: B is worse beyond --fail-over.",
    )
    compare.add_argument("before", metavar="A")
    compare.add_argument("after", metavar="B")
    compare.add_argument(
        "--fail-over", metavar="5%", help="exit 3 when a headline metric is surely worse by more than this"
    )
    compare.add_argument("--json", action="store_true", help="print one JSON object")
    compare.set_defaults(run=run_compare)
    reference = commands.add_parser("reference", help="published campaigns, examined by their own figures")
    reference.add_argument("name", nargs="?", metavar="NAME", help="a campaign of data/reference (default: list them)")
    reference.add_argument("--json", action="store_true", help="print one JSON object")
    reference.set_defaults(run=run_reference)


def run_compare(args):
    """Print the comparison; exit code 3 where B is worse beyond --fail-over, 1 where nothing can be compared."""
    from k25lib.findings.compare import compare_runs, readable, worse_beyond
    from k25lib.run import Run

    limit = None if args.fail_over is None else _fraction(args.fail_over)
    history = readable(Run.all())
    before, after = (_restarts(side, history) for side in (args.before, args.after))
    if not before or not after:
        raise UsageError("compare takes two runs, A and B")
    if {run.path for run in before} & {run.path for run in after}:
        raise UsageError("compare takes different runs: a run is on both sides")
    result = compare_runs(before, after, history=history)
    failed = worse_beyond(result["changes"], limit) if limit is not None else []
    names = [[run.path.name for run in side] for side in (before, after)]
    result = {"schema": "k25.compare/1", "before": names[0], "after": names[1], **result}
    result["worse_beyond"] = [row["metric"] for row in failed]
    if args.json:
        print_json(result)
    else:
        print(_text(result))
    if limit is not None and not result["comparable"]:
        print("k25: " + "; ".join(result["obstacles"]), file=sys.stderr)
    return WORSE if failed else 0 if result["comparable"] else 1


def _restarts(side, known):
    """The runs that one side names: each word is a run, or a campaign's name for all its runs with measurements."""
    from k25lib.findings.compare import measurements
    from k25lib.run import Run

    found = []
    for word in dict.fromkeys(word for word in side.split(",") if word):
        named = [run for run in known if run.manifest.get("name") == word]
        whole = [run for run in named if measurements(run)]
        if len(whole) < len(named):
            print(f"{word}: {len(named) - len(whole)} of {len(named)} runs measured nothing: left out", file=sys.stderr)
        found += whole or [Run.find(word)]
    return found


def _fraction(text):
    is_percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (10 if is_percent else 1):  # 5 may be meant as 5 %: not to be guessed
        raise UsageError(f"--fail-over {text!r}: give a percentage such as 5% (or a fraction such as 0.05)")
    return value


def _text(result):
    lines = [f"{' and '.join(result['before'])}  ->  {' and '.join(result['after'])}"]
    if not result["comparable"]:
        lines += ["These runs cannot be compared:", *(f"  {reason}" for reason in result["obstacles"])]
    elif result["verdict"]:
        means = f": {result['meaning']}" if result["meaning"] else ""
        lines.append(f"verdict: {result['verdict']}{means} (by the lines marked *)")
    lines += [f"{'*' if row['headline'] else ' '} {row['text']}" for row in result["changes"]]
    if result["changes"] and not any(row["df"] for row in result["changes"]):
        lines.append(
            "The spread is known once a configuration has run twice: name several restarts a side (A1,A2 B1,B2)."
        )
    if spread := [
        f"{row['spread_percent']:.1f} % ({row['metric']}, {row['df']} degrees of freedom)"
        for row in result["changes"]
        if row["headline"] and row["df"]
    ]:
        lines.append(f"spread between restarts of one configuration: {', '.join(spread)}")
    if result["worse_beyond"]:
        lines.append(f"worse beyond --fail-over: {', '.join(result['worse_beyond'])}")
    if result["environment"]:
        lines.append("environment:")
        changed = (f"{row['what']}: {row['before']} -> {row['after']}" for row in result["environment"])
        lines += [f"  {textwrap.shorten(text, 160, placeholder=' …')}" for text in changed]
    return "\n".join(lines)


def run_reference(args):
    """Print a published campaign's review, or the list of campaigns; exit code 0."""
    from k25lib.findings.campaigns import examine, references

    if not args.name:
        names = {name: campaign["campaign"]["name"] for name, campaign in references().items()}
        if args.json:
            print_json({"schema": "k25.reference/1", "campaigns": names})
        else:
            print("\n".join(f"{name:<28} {title}" for name, title in names.items()))
        return 0
    found = examine(args.name)
    if args.json:
        print_json({"schema": "k25.reference/1", **found})
    else:
        print(_reference_text(found))
    return 0


def _reference_text(found):
    about = found["campaign"]
    lines = [f"{about['name']} ({about['engine']}; {about['source']})"]
    if found["contradictions"]:
        lines += ["", "What does not close:"]
        for row in found["contradictions"]:
            lines += [f"- {row['finding']}: {row['detail']}", f"  so: {row['follows']}"]
    if found["efficiency"]:
        lines += ["", found["efficiency"]["text"], "The published efficiency comes out with:"]
        lines += [f"- {row['inputs']} ({row['bytes'] / 1e9:.3f} GB)" for row in found["inputs"]]
    for row in found["whatif"]:
        lines += ["", f"{row['text']}:"]
        lines += [f"  {case['saving_ms']:+6.2f} ms  {case['assumes']}" for case in row["cases"]]
    unit = "%" if not found["efficiency"] else "ms"
    lines += ["", "What dominates, and what comes when those before it are gone:"]
    for row in found["next"]:
        lines.append(
            f"- {row['category']}: {row['ms']:g} {unit}, then {row['percent_without_those_before']:.0f} % of the rest"
        )
    return "\n".join(lines)
