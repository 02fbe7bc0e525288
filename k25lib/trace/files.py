"""The files of a capture: which there are, which ranks each holds, and one rank of one file as a Trace."""

from pathlib import Path

from k25lib.errors import K25Error, UsageError
from k25lib.trace import kineto, nsys

TRACES = (".json", ".json.gz")


def find_files(paths):
    """(trace files, text tables) of files and folders. A folder without traces is searched one level down."""
    if not all(map(str, paths)):
        raise UsageError("an empty path names no trace; . is the current folder")
    traces, tables = [], []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"no such file or folder: {path}")
        if path.is_dir():
            for inside in (sorted(path.iterdir()), sorted(path.glob("*/*"))):
                found = [p for p in inside if _is_trace(p)] or [p for p in inside if _looks_like_one(p)]
                beside = [p for p in inside if _is_table(p)]
                if found or beside:
                    break
            traces += found
            tables += beside
        elif path.suffix == ".txt":
            tables.append(path)
        elif path.suffix in (".nsys-rep", ".qdrep"):
            raise UsageError(f"{path}: export it first: nsys export --type sqlite {path}")
        else:
            traces.append(path)
    if not traces and not tables:
        raise K25Error(
            f"no traces (*.json, *.json.gz, *.sqlite) in {', '.join(map(str, paths))}: "
            "was the capture stopped and written?"
        )
    return [list({path.resolve(): path for path in reversed(each)}.values())[::-1] for each in (traces, tables)]


def _is_trace(path):
    if not path.is_file():
        return False
    is_json = path.name.endswith(TRACES) and ("trace" in path.name or path.name.endswith(".gz"))
    return is_json or path.suffix in nsys.SUFFIXES


def _looks_like_one(path):
    """Whether a .json file whose name says nothing begins as a trace does."""
    if not path.is_file() or path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return b'"traceEvents"' in file.read(1 << 16)


def _is_table(path):
    return path.is_file() and path.suffix == ".txt" and "profiler_out" in path.name


def peek(path):
    """The ranks in a file, from its start: dicts of path, rank, world_size, process, start_ns, and for nsys device."""
    return nsys.peek(path) if nsys.is_nsys(path) else [kineto.peek(path)]


def read(path, device=None, launches=False):
    """One rank's Trace; `device` is of its `peek`. `launches` also takes when each launch began on the CPU."""
    is_nsys = isinstance(device, tuple)
    return nsys.read(path, device, launches) if is_nsys else kineto.read(path, launches, device)
