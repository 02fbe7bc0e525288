"""The run and the capture that notebook 06 shows: as its parameters name them, or picked in JupyterLab."""

from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from k25lib.errors import K25Error, UsageError
from k25lib.findings import steps
from k25lib.findings.compare import readable
from k25lib.nsys_reports import fetch
from k25lib.report import tables
from k25lib.report.notebook import PLOTLY, json_of
from k25lib.run import Run


class Choice:
    """A run and one of its captures ("" is all of them), as the notebook's parameters say; what `show` has shown is
    drawn again when a picker of `offer` chooses others.

    `capture` may also be a path of traces. They belong to no run yet: where `run` is empty, a new interactive run is
    made for their tables.
    """

    def __init__(self, run="", capture=""):
        self.is_named = bool(run)
        self.run, self.capture = Run.open_or_new(run, reading=True), capture
        self._shown = []
        if capture and not run and capture not in self.run.captures() and Path(capture).exists():
            self.run = Run.create("interactive", kind="interactive")

    def traces(self):
        """Where the traces of the chosen captures are, as {capture: path}. A capture that was given as a path is named
        by the path's last part."""
        known = self.run.captures()
        if made := fetch([path for name, path in known.items() if self.capture in ("", name)]):
            self.run.update(captures=made)
        if self.capture and self.capture not in known:
            path = Path(self.capture).resolve()
            own = known.get(path.name)
            if path.name in {*known, *(self.run.manifest.get("captures") or {})} and path != (own and own.resolve()):
                raise UsageError(
                    f"{self.run.path.name} has a capture {path.name} of its own, which {path} would replace: "
                    "leave run empty for a new run, or rename the folder"
                )
            known, self.capture = {path.name: path}, path.name
        found = {name: path for name, path in known.items() if self.capture in ("", name)}
        if not found:
            raise UsageError(
                "this run has no capture: run 05_profiler_capture first, or set capture to a path of trace files"
            )
        return found

    def table(self, name, **only):
        """A table of the chosen run: the rows of the chosen capture whose columns have the values of `only`."""
        rows = self.run.table(name)
        for column, value in {"capture": self.capture, **only}.items():
            if column in rows and value != "":
                rows = rows[rows[column] == value]
        return rows

    def show(self, make, *columns):
        """Show what `make()` returns, a figure or a DataFrame (`columns`: those to show, as tables.table takes them),
        now and after each choice."""
        made = _bundle(make(), columns)
        if InteractiveShell.initialized():
            self._shown.append((display(made, raw=True, display_id=True), make, columns))

    def offer(self):
        """Show pickers of every run that has a breakdown, the newest first, and of its captures. Nothing where the
        parameters named a run, or outside a notebook."""
        if self.is_named or not InteractiveShell.initialized():
            return
        from ipywidgets import Dropdown, HBox, Label, VBox

        runs = {r.path.name: r for r in reversed(readable(Run.all())) if steps.captures(r.table("steps"))}
        run = Dropdown(options=list(runs), value=self.run.path.name if self.run.path.name in runs else None)
        capture, told = Dropdown(), Label()
        run.description, capture.description, run.layout.width = "run", "capture", "32rem"

        def fill(_=None):
            names = steps.captures(self.run.table("steps"))
            capture.options = [("all", ""), *((name, name) for name in names)]
            capture.value = self.capture if self.capture in names else ""

        def redraw(_=None):
            self.capture = capture.value or ""
            told.value = "drawing …"
            for handle, make, columns in self._shown:
                try:
                    made = _bundle(make(), columns)
                except (K25Error, ValueError, KeyError, OSError) as error:  # an older run's table may lack a column
                    made = {"text/plain": f"cannot be shown from this run's tables: {type(error).__name__}: {error}"}
                handle.update({"text/plain": "…"}, raw=True)  # JupyterLab's plotly keeps a figure that it has drawn
                handle.update(made, raw=True)
            told.value = f'to keep it: run = "{self.run.path.name}", capture = "{self.capture}"'

        def switch(change):
            self.run = runs[change["new"]]
            capture.unobserve(redraw, "value")
            fill()
            capture.observe(redraw, "value")
            redraw()

        fill()
        run.observe(switch, "value")
        capture.observe(redraw, "value")
        display(VBox([HBox([run, capture]), told]))


def _bundle(made, columns):
    """The display data (MIME type -> content) of a figure or a DataFrame, the latter as tables.shown makes it."""
    if hasattr(made, "to_plotly_json"):
        return {PLOTLY: json_of(made)}
    shown = tables.shown(made, *columns)
    return {"text/html": shown.to_html(), "text/plain": shown.data.to_string(index=False)}
