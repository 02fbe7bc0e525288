"""The server of a campaign: one that runs already, or our own embedded one, behind the same three calls."""

import sys

from k25lib.client import Client
from k25lib.environment import gpus
from k25lib.errors import K25Error
from k25lib.run import PROJECT
from k25lib.server.embedded import Embedded
from k25lib.server.identity import discover


class Unavailable(K25Error):
    """What a phase needs can't be had; the message is the reason that the phase is skipped."""


class External:
    """A server that runs already: it is measured, never started, stopped or changed."""

    def __init__(self, settings, gpus_are_free=False):
        self.settings = settings
        self.gpus_are_free = gpus_are_free
        self.client = Client(settings.url)

    def up(self):
        """Facts for the manifest once something answers at the URL; raises K25Error if nothing does."""
        self.client.health()
        told = {k: v for k in ("model", "tp", "python", "config", "traces", "log") if (v := getattr(self.settings, k))}
        return {"kind": "external", "url": self.client.shown_url, **discover(self.client.url), **told}

    def free(self):
        """Raises Unavailable on a GPU machine, where the server holds the GPUs."""
        if gpus()["gpus"] and not self.gpus_are_free:
            raise Unavailable(
                f"the server at {self.client.shown_url} holds the GPUs; with --gpus-are-free it runs all the same"
            )

    def died(self):
        """What is known of a server that stopped answering: nothing, it is not ours."""
        return ""

    def close(self):
        """Nothing to do: the server was there before."""


class Own:
    """Our embedded server: started when a phase needs it, stopped when one needs the machine to itself."""

    def __init__(self, log=sys.stderr):
        self.server = None
        self.log = log

    def up(self):
        """Start it unless it runs; facts for the manifest."""
        if not (self.server and self.server.is_alive()):
            self.close()
            self.server = self.server or Embedded(PROJECT)  # a second start keeps its folder and its log
            self.server.start(on_stage=lambda stage: print(f"  server: {stage}", file=self.log, flush=True))
        s = self.server
        facts = {"url": s.url, "model": s.model, "tp": s.tp, "python": s.python}
        paths = {"config": s.config, "traces": s.traces, "log": s.log}
        return {"kind": "embedded", **facts, **{name: str(path) for name, path in paths.items()}}

    def free(self):
        """Stop it: two cores are few."""
        self.close()

    def died(self):
        """The last error of its log in one line, if it died."""
        return self.server.why_died() if self.server and not self.server.is_alive() else ""

    def close(self):
        """Stop it if it runs."""
        if self.server:
            self.server.stop()
