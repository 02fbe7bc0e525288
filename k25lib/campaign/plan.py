"""The plan: which phases there are, what each needs, and which of them are left."""

from dataclasses import dataclass
from pathlib import Path

from k25lib.errors import UsageError
from k25lib.run import PROJECT
from k25lib.settings import NOTEBOOKS


@dataclass(frozen=True)
class Phase:
    """One notebook of the campaign. `needs`: server, profiler (a server with one), free (no server beside it).
    `after`: phases it stands on."""

    notebook: Path
    table: str
    needs: str = ""
    after: tuple = ()

    @property
    def name(self):
        """The notebook's stem, such as 02_macro: the phase's name in manifest, logs and reports."""
        return self.notebook.stem


# Least invasive first. Microbenchmarks want the machine to themselves; the breakdown wants a capture, no server.
NEEDS = {
    "check": ("server", ()),
    "macro": ("server", ("check",)),
    "gemm": ("free", ()),
    "collectives": ("free", ()),
    "capture": ("profiler", ("check",)),
    "breakdown": ("", ("capture",)),
}


def default_phases(folder=PROJECT / "notebooks"):
    """The six phases, from the notebooks in `folder`."""
    folder = Path(folder)
    missing = [stem for stem in NOTEBOOKS.values() if not (folder / f"{stem}.ipynb").is_file()]
    if missing:
        raise UsageError(f"{folder} lacks {', '.join(f'{m}.ipynb' for m in missing)}")
    return [
        Phase(folder / f"{stem}.ipynb", table, NEEDS[table][0], tuple(NOTEBOOKS[t] for t in NEEDS[table][1]))
        for table, stem in NOTEBOOKS.items()
    ]


def chosen_phases(phases, only):
    """The phases that `only` names (numbers, names or tables, comma-separated); all of them if it is empty."""
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    chosen = []
    for word in wanted:
        found = [p for p in phases if word in (p.name, p.table) or p.name.split("_")[0] == word.zfill(2)]
        if not found:
            raise UsageError(f"--only {word}: no such phase; there are {', '.join(p.name for p in phases)}")
        chosen += found
    return [p for p in phases if p in chosen] if wanted else list(phases)


def left(phases, states):
    """The phases of a resumed run that are not done: every state but ok."""
    return [p for p in phases if states.get(p.name, {}).get("state") != "ok"]
