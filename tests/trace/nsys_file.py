"""Writes SQLite files to the schema of `nsys export`, of the events of Kineto traces."""

import sqlite3

from generate import BASE_NS

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER,
    launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL,
    gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
    blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL,
    localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL,
    sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER,
    dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER,
    migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER, copyCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER,
    int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""


FIXED = (
    "contextId registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory "
    "localMemoryPerThread localMemoryTotal gridId"
)


def insert(database, table, **row):
    columns = ", ".join(f'"{name}"' for name in row)
    database.execute(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(row))})", list(row.values()))


def ns(us):
    return round(us * 1000)


def kernel(database, start, end, name, device=0, stream=7, correlation=1, process=1 << 24, node=None):
    """One row of the kernel table; `name` is an id of StringIds."""
    fixed = dict.fromkeys(FIXED.split(), 1)
    insert(
        database,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        start=start,
        end=end,
        deviceId=device,
        streamId=stream,
        correlationId=correlation,
        globalPid=process,
        demangledName=name,
        shortName=name,
        graphNodeId=node,
        **fixed,
    )


def write(path, ranks, nvtx=True):
    """A file of one host: `ranks` is a list of each GPU's Kineto events (dicts), a process a GPU."""
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    insert(database, "TARGET_INFO_SESSION_START_TIME", utcEpochNs=BASE_NS)
    strings = {}

    def number(text):
        if text not in strings:
            strings[text] = len(strings) + 1
            insert(database, "StringIds", id=strings[text], value=text)
        return strings[text]

    for device, events in enumerate(ranks):
        process = (4711 + device) << 24
        launches = {}
        for e in events:
            if e.get("cat") == "kernel":
                launches[e["args"]["correlation"]] = launches.get(e["args"]["correlation"], 0) + 1
        for e in events:
            if e.get("ph") != "X":
                continue
            start, args = ns(e["ts"]), e.get("args", {})
            end = start + ns(e["dur"])
            where = {"deviceId": device, "contextId": 1, "globalPid": process}
            if e["cat"] == "kernel":
                correlation = args["correlation"]
                node = 7 if launches[correlation] > 1 else None
                kernel(database, start, end, number(e["name"]), device, args["stream"], correlation, process, node)
            elif e["cat"] in ("gpu_memcpy", "gpu_memset"):
                where |= {"streamId": args["stream"], "correlationId": args["correlation"], "bytes": 4}
                more = {"copyKind": 1} if e["cat"] == "gpu_memcpy" else {"value": 0}
                table = f"CUPTI_ACTIVITY_KIND_{e['cat'][4:].upper()}"
                insert(database, table, start=start, end=end, **where, **more)
            elif e["cat"] == "cuda_runtime":
                row = {"start": start, "end": end, "eventClass": 0, "globalTid": process + 77, "returnValue": 0}
                insert(
                    database,
                    "CUPTI_ACTIVITY_KIND_RUNTIME",
                    correlationId=args["correlation"],
                    nameId=number(e["name"]),
                    **row,
                )
            elif e["cat"] == "user_annotation" and nvtx:
                text = {"text": e["name"]} if device % 2 else {"textId": number(e["name"])}
                insert(database, "NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=process + 77, **text)
    database.commit()
    database.close()
    return path
