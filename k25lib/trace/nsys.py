"""Reads what `nsys export --type sqlite` writes: CUPTI's activities, of every GPU of a host in one file.

Tables and columns are those of Nsight Systems' documented schema; times are nanoseconds since the session began. Copies
on the GPU inside CUDA graphs are copies here; in the torch profiler's traces they are kernels (memcpy32_post).
"""

import sqlite3
from array import array
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from k25lib.errors import K25Error
from k25lib.trace.table import KERNEL, MEMCPY, MEMSET, SMALL, Trace, clean, loss

MAGIC = b"SQLite format 3\0"
SUFFIXES = (".sqlite", ".sqlite3", ".db")
KERNELS, GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES = (("CUPTI_ACTIVITY_KIND_MEMCPY", MEMCPY, "Memcpy"), ("CUPTI_ACTIVITY_KIND_MEMSET", MEMSET, "Memset"))
RUNTIME, NVTX, STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
NEEDED = ("start", "end", "deviceId", "streamId", "correlationId")
NAMES = ("demangledName", "shortName", "mangledName")  # the first that is there names a kernel
UNUSED = (  # documented, and nothing that a breakdown wants
    "contextId greenContextId launchType cacheConfig registersPerThread gridX gridY gridZ blockX blockY blockZ "
    "staticSharedMemory dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted "
    "sharedMemoryLimitConfig clusterX clusterY clusterZ clusterSchedulingPolicy maxPotentialClusterSize "
    "maxActiveClusters qmdBulkReleaseUs graphId graphExecId pid"
)
THREAD_BITS = 24  # globalTid is a globalPid with the thread's number in its lowest bits
PID = (1 << THREAD_BITS) - 1  # above the thread's, as many bits are the process's number
CHUNK_ROWS = 1 << 15
EXACT_NS = 1 << 52


def is_nsys(path):
    """Whether a file is an SQLite database, or is called one."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix in SUFFIXES
    except OSError:
        return path.suffix in SUFFIXES


@contextmanager
def _opened(path):
    """(connection, {table: columns}); the file is never written, waited for or recovered."""
    try:
        if Path(path).stat().st_size == 0:
            raise K25Error(f"{path} is empty")
        uri = Path(path).resolve().as_uri() + "?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            yield connection, {n: [row[1] for row in connection.execute(f'PRAGMA table_info("{n}")')] for n in names}
    except OSError as error:
        raise K25Error(f"cannot read {path}: {error.strerror}") from None
    except sqlite3.Error as error:
        raise K25Error(f"{path} cannot be read as an nsys export: {error}") from None


def _check(path, tables):
    """Raise K25Error where the tables cannot give kernels, with what to do."""
    if KERNELS in tables:
        missing = [c for c in NEEDED if c not in tables[KERNELS]]
        if missing or not set(NAMES) & set(tables[KERNELS]):
            raise K25Error(f"{path}: {KERNELS} has no column {', '.join(missing or NAMES)}: an unknown schema of nsys")
        if STRINGS not in tables:
            raise K25Error(f"{path} has no table {STRINGS}: the kernels' names are lost; export it again")
    elif GRAPHS in tables:
        raise K25Error(f"{path} has CUDA graphs as a whole, no kernels: profile with --cuda-graph-trace=node")
    elif STRINGS in tables:
        raise K25Error(f"{path} has no GPU kernels (no {KERNELS}): profile with --trace=cuda,nvtx")
    else:
        some = ", ".join(sorted(tables)[:4]) or "none"
        raise K25Error(f"{path} is no nsys export (its tables: {some}): use nsys export --type sqlite")


def peek(path):
    """What a file holds: a dict for each GPU with path, rank, rank_from, world_size, process, start_ns, device, place,
    losses.

    `device` is what `read` wants: (deviceId, globalPid or None). Ranks are numbered from 0 in the order of the devices,
    of each process in turn where processes share numbers; `place` is {"dp", "tp"} as devices and processes tell it.
    Raises K25Error if it is no nsys export with kernels.
    """
    with _opened(path) as (connection, tables):
        _check(path, tables)
        pid = _whole("globalPid") if "globalPid" in tables[KERNELS] else "NULL"
        counts, first_ns, nowhere = _gpus(connection, pid)
        start_ns = _epoch_ns(connection, tables) + first_ns
        losses = list(_file_losses(path, tables))
    if not counts:
        raise K25Error(f"{path} has no GPU kernels (0 rows in {KERNELS}): was anything running?")
    if nowhere:
        losses.append(loss(path, "no device", nowhere, f"rows of {KERNELS} without a whole deviceId: in no figure"))
    small = {key: n for key, n in counts.items() if n < SMALL * max(counts.values())}
    if small:
        detail = f"kernels of {len(small)} processes or GPUs with too few for a rank: in no figure"
        losses.append(loss(path, "other process", sum(small.values()), detail))
    found = [key for key in counts if key not in small]
    alone = len({device for device, _ in found}) == len(found)  # else each process counts its GPUs from 0
    found.sort(key=lambda key: key[0] if alone else (key[1] or 0, key[0]))
    tp = _tensor_parallel(found)
    known = {
        "path": str(path),
        "rank_from": "deviceId",
        "world_size": len(found),
        "process": None,
        "start_ns": start_ns,
    }
    return [
        known | {"rank": i, "device": key, "place": {"dp": i // tp, "tp": i % tp}, "losses": [] if i else losses}
        for i, key in enumerate(found)
    ]


def _tensor_parallel(found):
    """Ranks of one replica among (device, process): the devices of a process where it has several, those that every
    replica has where their numbers come again, else all."""
    processes, devices = ({key[i] for key in found} for i in (1, 0))
    for size in (len(found) // len(processes), len(devices)):
        if 1 < size < len(found) and len(found) % size == 0:
            return size
    return len(found)


def _gpus(connection, pid):
    """({(device, process): kernels}, ns at which the first of the file's kernels starts), of what can be read."""
    counts, first_ns, nowhere = {}, 0, 0
    whole = "typeof(deviceId) = 'integer' AND typeof(start) = 'integer'"
    try:
        row = connection.execute(f"SELECT start FROM {KERNELS} WHERE {whole} LIMIT 1").fetchone()
        first_ns = row[0] if row else 0
        query = f"SELECT deviceId, {pid}, COUNT(*) FROM {KERNELS} WHERE {whole} GROUP BY 1, 2"
        counts = {(device, process): count for device, process, count in connection.execute(query)}
        query = f"SELECT COUNT(*) FROM {KERNELS} WHERE typeof(deviceId) <> 'integer'"
        nowhere = connection.execute(query).fetchone()[0]
    except sqlite3.DatabaseError:
        try:
            for key in connection.execute(f"SELECT deviceId, {pid} FROM {KERNELS} WHERE {whole}"):
                counts[key] = counts.get(key, 0) + 1
        except sqlite3.DatabaseError:
            pass  # the rows before the damage count; reading tells of it
    return counts, first_ns, nowhere


def _whole(column):
    """The SQL of a column's whole numbers; other values are NULL."""
    return f"CASE typeof({column}) WHEN 'integer' THEN {column} END"


def _file_losses(path, tables):
    """What is to be told of a file as a whole."""
    unknown = sorted(set(tables[KERNELS]) - {*NEEDED, *NAMES, *UNUSED.split(), "globalPid", "graphNodeId"})
    if unknown:
        yield loss(path, "unknown columns", len(unknown), f"in no schema known here, not used: {', '.join(unknown)}")
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        yield loss(path, "unfinished export", 1, "a -wal file lies beside it: rows in it are not read; export it again")
    if GRAPHS in tables:
        detail = "graph launches recorded as a whole lack their kernels: profile with --cuda-graph-trace=node"
        yield loss(path, "whole graphs", 1, detail)
    if _is_cut(path):
        yield loss(path, "truncated", 1, "the file is shorter than its own header says: later rows are lost")


def _is_cut(path):
    with Path(path).open("rb") as file:
        header = file.read(32)
    page = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    return Path(path).stat().st_size < (65536 if page == 1 else page) * pages


def _epoch_ns(connection, tables):
    """Absolute time at which the session's clock is 0; 0 if the file does not say."""
    table = "TARGET_INFO_SESSION_START_TIME"
    row = (
        connection.execute(f"SELECT utcEpochNs FROM {table}").fetchone()
        if "utcEpochNs" in tables.get(table, ())
        else None
    )
    return row[0] if row and isinstance(row[0], int) else 0


def read(path, device, launches=False):
    """One GPU of a file as a Trace; `device` as `peek` gives it. `launches` also takes when each launch began.

    `cpu_marks` are the NVTX ranges of the GPU's process. Rows that cannot be read are counted in `losses`.
    """
    trace = Trace(path=str(path), truncated=_is_cut(path))
    with _opened(path) as (connection, tables):
        _check(path, tables)
        reader = _Reader(trace, connection, tables, device)
        reader.events(KERNELS, KERNEL, next(name for name in NAMES if name in tables[KERNELS]))
        for table, kind, label in COPIES:
            if table in tables:
                reader.events(table, kind, label)
        trace.meta = {"rank": None, "world_size": None, "base_ns": _epoch_ns(connection, tables), "process": None}
        trace.meta |= {"device": device[0], "pid": device[1] and device[1] >> THREAD_BITS & PID}
        trace.meta |= {"events": len(reader.start), "slow_windows": 0}
        first_ns = reader.finish()
        trace.cpu_marks = [(name, s - first_ns, e - first_ns) for name, s, e in reader.ranges()]
        if launches:
            trace.launches = {c: t - first_ns for c, t in reader.launches()}
    return trace


class _Reader:
    """Rows of one GPU into columns; what cannot be read is told."""

    def __init__(self, trace, connection, tables, device):
        self.trace, self.connection, self.tables, self.device = trace, connection, tables, device
        self.start, self.end, self.stream, self.correlation, self.node, self.name = (array("q") for _ in range(6))
        self.kind, self.names = array("b"), {}

    def rows(self, table, wanted, where="1", values=()):
        """Rows in the file's order, as far as the file can be read."""
        cursor = self.connection.cursor()
        try:
            cursor.execute(f"SELECT {', '.join(wanted)} FROM {table} WHERE {where}", values)
            while chunk := cursor.fetchmany(CHUNK_ROWS):
                yield chunk
        except sqlite3.DatabaseError as error:
            self.trace.truncated = True
            self.trace.lose("truncated", 1, f"{table} ends early ({error}): later rows are lost")

    def mine(self, table):
        """The condition that a row is this GPU's and process's."""
        device, process = self.device
        if process is None or "globalPid" not in self.tables[table]:
            return "deviceId IS ?", (device,)
        return "deviceId IS ? AND globalPid IS ?", (device, process)

    def events(self, table, kind, name):
        """Append the rows of a table; `name` is the column with the name's id, or the name itself."""
        columns = self.tables[table]
        if missing := [c for c in NEEDED if c not in columns]:
            self.trace.lose("missing columns", 1, f"{table} has no {', '.join(missing)}: not read")
            return
        whole = ["start", "end", "streamId", "correlationId", "graphNodeId" if "graphNodeId" in columns else "0"]
        whole.append(name if name in columns else "copyKind" if "copyKind" in columns else "0")
        wanted = [f'"{c}"' if c in columns else c for c in whole]
        wanted = [*wanted[:2], *(f"CASE typeof({c}) WHEN 'integer' THEN {c} ELSE -1 END" for c in wanted[2:])]
        where, values = self.mine(table)
        odd = 0
        for chunk in self.rows(table, wanted, where, values):
            good = [row for row in chunk if type(row[0]) is int and type(row[1]) is int]
            odd += len(chunk) - len(good)
            columns = zip(*good, strict=True) if good else ((),) * 6
            places = (self.start, self.end, self.stream, self.correlation, self.node)
            *numbers, labels = columns
            for place, values_of in zip(places, numbers, strict=True):
                place.extend(values_of)
            labels = [label if kind == KERNEL else (name, label) for label in labels]
            known = self.names
            self.name.extend([known.setdefault(label, len(known)) for label in labels])
            self.kind.extend([kind] * len(good))
        self.trace.lose("no time", odd, f"rows of {table} without a whole start and end, set aside")

    def finish(self):
        """Fill the Trace; returns the file's ns at its origin."""
        trace = self.trace
        strings = {}
        for chunk in self.rows(STRINGS, ("id", "value")):
            strings.update((i, value) for i, value in chunk if i in self.names and isinstance(value, str))
        trace.names = [
            f"{label[0]} {_COPY_KINDS.get(label[1], '')}".strip()
            if isinstance(label, tuple)
            else str(strings.get(label))
            for label in self.names
        ]
        nameless = [label for label in self.names if not isinstance(label, tuple) and label not in strings]
        for label in nameless:
            trace.names[self.names[label]] = f"name {label}"
        trace.lose("no name", len(nameless), f"ids without a text in {STRINGS}: their kernels are kept as `name ID`")
        trace.name_id, trace.stream = np.array(self.name, np.uint32), np.array(self.stream, np.int64)
        trace.correlation, trace.kind = np.array(self.correlation, np.int64), np.array(self.kind, np.int8)
        trace.graph_node = np.array(self.node, np.int64)
        start, end = np.array(self.start, np.int64), np.array(self.end, np.int64)
        usual = int(np.median(start)) if len(start) else 0
        offset = usual // 1000 * 1000 if usual > EXACT_NS else 0  # later times are not exact as doubles
        first_us = clean(trace, (start - offset) / 1000, (end - start) / 1000)
        trace.origin_ns += offset
        return round(first_us * 1000) + offset

    def ranges(self):
        """(name, start ns, end ns) of the NVTX push/pop and start/end ranges of the GPU's process."""
        columns = self.tables.get(NVTX, ())
        if not {"start", "end"} <= set(columns):
            return
        text = f"(SELECT value FROM {STRINGS} WHERE id = textId)" if "textId" in columns else "NULL"
        text = f"COALESCE(text, {text})" if "text" in columns else text
        where = "typeof(start) = 'integer' AND typeof(\"end\") = 'integer'"
        if self.device[1] is None and "globalTid" in columns:
            tid = f"SELECT COUNT(DISTINCT globalTid >> {THREAD_BITS}) FROM {NVTX} WHERE {where}"
            if (processes := self.connection.execute(tid).fetchone()[0]) > 1:
                detail = f"kernels tell no process, NVTX ranges are of {processes}: none of them is used"
                self.trace.lose("no process", 1, detail)
                return
        for chunk in self.rows(NVTX, ("start", '"end"', text), *self.of_process(columns, where)):
            yield from ((name, start, end) for start, end, name in chunk if isinstance(name, str))

    def launches(self):
        """(correlation id, start ns) of the runtime calls of the GPU's process."""
        columns = self.tables.get(RUNTIME, ())
        if {"start", "correlationId"} <= set(columns):
            where = "typeof(start) = 'integer' AND typeof(correlationId) = 'integer'"
            for chunk in self.rows(RUNTIME, ("correlationId", "start"), *self.of_process(columns, where)):
                yield from chunk

    def of_process(self, columns, where):
        process = self.device[1]
        if process is None or "globalTid" not in columns:
            return where, ()
        return f"{where} AND globalTid >> {THREAD_BITS} = ?", (process >> THREAD_BITS,)


_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP", -1: ""}
