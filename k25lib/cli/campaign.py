"""Commands: the campaign (`run`) and its report (`report`)."""

import math
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
    run.add_argument("--allow-restart", action="store_true", help="stop and restart the server as the plan needs it")
    run.add_argument("--wait", nargs="?", const=7200.0, type=float, metavar="SECONDS", help="until the server is ready")
    run.add_argument("--dry-run", action="store_true", help="only say what would run")
    run.set_defaults(run=run_campaign)
    report = commands.add_parser("report", help="write a run's document and page again, from what it has")
    report.add_argument("run_name", metavar="RUN", help="a path, a name or `newest`")
    report.set_defaults(run=report_run)


def run_campaign(args):
    """Run or resume a campaign; exit 1 if a phase failed."""
    from k25lib.campaign.plan import chosen_phases, default_phases
    from k25lib.campaign.runner import Runner, new_run, settings_of
    from k25lib.campaign.servers import External, alone, alone_in
    from k25lib.run import PROJECT, Run
    from k25lib.settings import load_settings, with_server

    phases = default_phases()
    chosen_phases(phases, args.only)
    if args.wait is not None and not 0 < args.wait < math.inf:
        raise UsageError(f"--wait takes a positive number of seconds, not {args.wait:g}")
    run = None
    if args.resume is not None:
        if args.set or args.campaign:
            raise UsageError("a resumed run keeps its settings: --set and --campaign go with a new run")
        run = Run.find(args.resume, kind="campaign")
        settings = settings_of(run)
    else:
        settings = load_settings(args.campaign or PROJECT / "campaign.toml", args.set)
    if args.url == "":
        raise UsageError("--url is empty: give the server's URL, or leave --url out for the embedded server")
    if args.url:
        settings = with_server(settings, url=args.url)
    if args.allow_restart and not settings.server.url:
        raise UsageError("--allow-restart goes with a server of yours: give --url; the embedded one needs no leave")
    embedded = not settings.server.url
    runner = Runner(run, phases, settings, None, embedded)
    runner.check()
    if args.dry_run:
        return _say_plan(_chosen(run, phases, args.only), settings, args)
    with alone(settings.server.url):
        if args.wait and not embedded:
            External(settings.server).wait(args.wait, settings.control)
        runner.server = _server(settings, args)
        runner.run = run = run or new_run(settings, ["k25", *sys.argv[1:]])
        print(f"run: {run.path}", file=sys.stderr)
        with alone_in(run):
            failed = runner.go(_chosen(run, phases, args.only))  # what another has done meanwhile is done
    wrong = [run.manifest.get(name) for name in ("server_error", "report_error")]
    if not wrong[1]:
        print(run.report_dir / "index.html")
    return 1 if failed or any(wrong) else 0


def _chosen(run, phases, only):
    """The phases to run: those that `only` names, else of a resumed run what is left, of a new one all."""
    from k25lib.campaign.plan import chosen_phases, left

    return left(phases, run.manifest.get("phases", {})) if run and not only else chosen_phases(phases, only)


def _server(settings, args):
    from k25lib.campaign.servers import Controlled, External, Own

    if not settings.server.url:
        return Own()
    if args.allow_restart:
        return Controlled(settings.server, settings.control, settings.profiler)
    return External(settings.server, args.gpus_are_free)


def _say_plan(chosen, settings, args):
    from k25lib.campaign.servers import Controlled

    print("phases:", ", ".join(phase.name for phase in chosen))
    print("server:", settings.server.url or "the embedded one, stopped for the microbenchmarks")
    if args.allow_restart:
        server = Controlled(settings.server, settings.control, settings.profiler, allowed=False, dry=True)
        for command in server.plan():
            print("would run:", command)


def report_run(args):
    """Write the report of a run again."""
    from k25lib.campaign.report import write_report
    from k25lib.run import Run

    print(write_report(Run.find(args.run_name)) / "index.html")
