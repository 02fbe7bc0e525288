"""Commands: serve (the embedded server by itself) and status (of any server)."""

import signal
import sys
import time
from pathlib import Path

from k25lib.cli import print_json


def add(commands):
    """Declare the commands of this module."""
    serve = commands.add_parser("serve", help="start the embedded vLLM (CPU, tiny Kimi-K2.5) and print its URL")
    serve.add_argument("--port", type=int, default=0, help="default: a free one")
    serve.add_argument("--install", action="store_true", help="make what it needs (vLLM, the model) and start nothing")
    serve.add_argument("--no-profiler", action="store_true", help="without vLLM's torch profiler")
    serve.add_argument("vllm_args", nargs="*", metavar="-- ARGS", help="more arguments for `vllm serve`, after --")
    serve.set_defaults(run=_serve)

    status = commands.add_parser("status", help="is a server up, ready and free, and what is it?")
    status.add_argument("url", metavar="URL")
    status.add_argument("--model", default="", help="the model to ask for a token; default: the first served one")
    status.add_argument("--json", action="store_true", help="one JSON object on stdout")
    status.set_defaults(run=_status)


def _serve(args):
    from k25lib.server.embedded import Embedded

    def on_signal(*_):
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, on_signal)
    server = Embedded(
        Path(__file__).parents[2], profiler=not args.no_profiler, extra_args=args.vllm_args, port=args.port
    )

    def tell(text):
        print(text, file=sys.stderr, flush=True)

    try:
        if args.install:
            server.install(tell)
            return 0
        server.start(tell)
        print(server.url, flush=True)
        print(f"log: {server.log}; traces: {server.traces}; Ctrl-C ends it", file=sys.stderr, flush=True)
        while server.is_alive():
            time.sleep(0.5)
        print(f"k25: the server has ended: {server.why_died()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ending the server", file=sys.stderr, flush=True)
        return 0
    finally:
        server.stop()


def _status(args):
    from k25lib.client import Client, NotReady
    from k25lib.errors import K25Error

    client = Client(args.url)
    found = {"schema": "k25.status/1", "url": client.shown_url, "up": False, "ready": False, "why": ""}
    found |= {"version": "", "model": "", "models": [], "running": None, "waiting": None, "busy": None}
    try:
        healthy = client.health()
        found["up"] = True
        found["models"] = [model["id"] for model in client.models()]
        found["version"] = client.version()
        found["running"], found["waiting"] = client.running()
        if found["running"] is not None:
            found["busy"] = bool(found["running"] or found["waiting"])
        if not healthy:
            raise NotReady(f"{client.shown_url}: the engine is not healthy; look at the server's log")
        found["model"] = client.ready(args.model)
        found["ready"] = True
    except K25Error as error:
        found["why"] = str(error)
    if args.json:
        print_json(found)
    elif found["ready"]:
        load = {None: "no metrics: busy or not is unknown", False: "idle"}.get(
            found["busy"], f"busy: {found['running']:g} running, {found['waiting'] or 0:g} waiting"
        )
        print(
            f"ready: vLLM {found['version'] or '(version unknown)'} serves {found['model']} at {found['url']}; {load}"
        )
    else:
        print(f"k25: {found['why']}", file=sys.stderr)
    return 0 if found["ready"] else 1
