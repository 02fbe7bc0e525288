"""Commands: the campaign (`run`) and its report (`report`)."""

import sys

from k25lib.errors import UsageError


def add(commands):
    """Declare `k25 run` and `k25 report`."""
    run = commands.add_parser("run", help="run the six notebooks in order and write the report")
    run.add_argument("--url", help="a running server; without it the embedded one (real vLLM on the CPU) is started")
    run.add_argument("--campaign", default="", metavar="FILE", help="the campaign file (default: campaign.toml)")
    run.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override a setting")
    run.add_argument("--only", default="", metavar="02,05", help="only these phases (numbers or names)")
    run.add_argument("--resume", metavar="RUN", help="go on with a run (a path, a name or `newest`): what is not done")
    run.add_argument("--gpus-are-free", action="store_true", help="run the microbenchmarks beside the running server")
    run.set_defaults(run=run_campaign)
    report = commands.add_parser("report", help="write a run's document and page again, from what it has")
    report.add_argument("run_name", metavar="RUN", help="a path, a name or `newest`")
    report.set_defaults(run=report_run)


def run_campaign(args):
    """Run or resume a campaign; exit 1 if a phase failed."""
    from k25lib.campaign.plan import chosen_phases, default_phases, left
    from k25lib.campaign.runner import Runner, new_run, settings_of
    from k25lib.campaign.servers import External, Own
    from k25lib.run import PROJECT, Run
    from k25lib.settings import load_settings, with_server

    phases = default_phases()
    chosen = chosen_phases(phases, args.only)
    if args.resume:
        if args.set or args.campaign:
            raise UsageError("a resumed run keeps its settings: --set and --campaign go with a new run")
        run = Run.find(args.resume)
        settings = settings_of(run)
        chosen = chosen if args.only else left(phases, run.manifest.get("phases", {}))
    else:
        run = None
        settings = load_settings(args.campaign or PROJECT / "campaign.toml", args.set)
    if args.url:
        settings = with_server(settings, url=args.url)
    embedded = not settings.server.url
    server = Own() if embedded else External(settings.server, args.gpus_are_free)
    runner = Runner(run, phases, settings, server, embedded)
    runner.check()
    if run is None:
        run = runner.run = new_run(settings, phases, ["k25", *sys.argv[1:]])
    print(f"run: {run.path}", file=sys.stderr)
    failed = runner.go(chosen)
    print(run.report_dir / "index.html")
    return 1 if failed else 0


def report_run(args):
    """Write the report of a run again."""
    from k25lib.campaign.report import write_report
    from k25lib.run import Run

    print(write_report(Run.find(args.run_name)) / "index.html")
