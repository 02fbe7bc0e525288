"""A trace file as windows of whole events: decompressed in pieces, cut where one event ends and the next begins."""

import re
import zlib
from pathlib import Path

from isal import isal_zlib

from k25lib.errors import K25Error

WINDOW_BYTES = 1 << 19  # the events of a window stay in the processor's cache
LIMIT_BYTES = 16 << 20  # no header and no event is larger than this

_OTHERS = {  # how files start that are something else
    b"\x1f\x8b": "it is gzipped twice: gunzip it once",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd: unzstd it first",
    b"\xfd7zXZ": "it is compressed by xz: unxz it first",
    b"BZh": "it is compressed by bzip2: bunzip2 it first",
    b"PK\x03\x04": "it is a zip archive: unzip it first",
    b"\xff\xfe": "its text is UTF-16 or UTF-32: convert it to UTF-8",
    b"\xfe\xff": "its text is UTF-16: convert it to UTF-8",
    b"\x00": "it is binary, UTF-16 or UTF-32: convert text to UTF-8",
}

_KEY = rb'"(?:ph|cat|name|pid|tid|ts|dur|id|bp|s|args|tts|cname|sf)"\s*:'
BOUNDARY = re.compile(rb"\}\s*,[\s,]*(?=\{\s*" + _KEY + rb")")
_NATIVE_BOUNDARY = b"},\n  {"


def pieces(path, warnings):
    """Lists of byte strings of about WINDOW_BYTES, from plain or (multi-member, padded, cut) gzip files."""
    try:
        file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - closed below, when the pieces are done
    except OSError as error:
        raise K25Error(f"cannot read {path}: {error.strerror}") from None
    with file:
        magic = file.read(2)
        file.seek(0)
        if magic != b"\x1f\x8b":
            while block := file.read(WINDOW_BYTES):
                yield [block]
            return
        member, block, done, size, total, in_member = isal_zlib.decompressobj(wbits=31), b"", [], 0, 0, False
        while block := block or file.read(1 << 16):
            in_member = True
            try:
                out = member.decompress(block)
            except isal_zlib.error as error:
                warnings.append(("damaged gzip", f"decompression stopped: {error}"))
                done.extend(_before_damage(path, total))
                in_member = False
                break
            block = b""
            if member.eof:
                block = member.unused_data.lstrip(b"\0")
                member, in_member = isal_zlib.decompressobj(wbits=31), bool(block)
            done.append(out)
            size += len(out)
            total += len(out)
            if size >= WINDOW_BYTES:
                yield done
                done, size = [], 0
        if done:
            yield done
        if in_member:
            warnings.append(("truncated", "the gzip stream ends early: events after that point are lost"))


def _before_damage(path, had):
    """What zlib gets out of a damaged file behind its first `had` bytes: isal gives none of the block it fails in."""
    member, size = zlib.decompressobj(wbits=31), 1 << 14
    with Path(path).open("rb") as file:
        while block := file.read(size):
            before = member.copy()
            try:
                out = member.decompress(block)
            except zlib.error:
                if size == 1:
                    return
                file.seek(-len(block), 1)
                member, size = before, 1  # byte by byte up to the damage
                continue
            if member.eof:
                file.seek(-len(member.unused_data), 1)
                member = zlib.decompressobj(wbits=31)
            yield out[max(had, 0) :]
            had -= len(out)


def open_events(path, blocks, warnings):
    """Read up to the first event. Returns (text before the events, bytes after the array's bracket)."""
    head = b""
    for piece in blocks:
        head = b"".join([head, *piece])
        text = head[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
        if text.startswith(b"["):
            return b"", head[head.index(b"[") + 1 :]
        if text and not text.startswith(b"{"):
            break
        key = head.find(b'"traceEvents"')
        bracket = head.find(b"[", key) if key >= 0 else -1
        if bracket >= 0:
            return head[:key], head[bracket + 1 :]
        if len(head) > LIMIT_BYTES:
            break
    if not head:
        raise K25Error(f"{path} is empty")
    reason = next((told for magic, told in _OTHERS.items() if head.startswith(magic)), "no traceEvents in it")
    reason = "; ".join(detail for _, detail in warnings) or reason
    raise K25Error(f"{path} is not a Kineto trace ({reason})")


def feed(blocks, tail, reader):
    """Give the reader every window of whole events, then the rest (`last`), and the text after the events (`foot`)."""
    columns, closed = reader.columns, False
    for piece in blocks:
        last = piece[-1]
        cut = last.rfind(_NATIVE_BOUNDARY)
        if cut >= 0 and not closed:
            closed = reader.window(tail, *piece[:-1], last[: cut + 1])
            tail = last[cut + 2 :]
            continue
        tail = b"".join([tail, *piece])
        if closed:
            tail = tail[-LIMIT_BYTES:]
            continue
        boundaries = [m.span() for m in BOUNDARY.finditer(tail, max(0, len(tail) - sum(map(len, piece)) - 64))]
        if boundaries:
            start, end = boundaries[-1]
            closed = reader.window(tail[: start + 1])
            tail = tail[end:]
        elif len(tail) > LIMIT_BYTES:
            columns.warnings.append(("truncated", "no event boundary in 16 MB: the rest of the file was not read"))
            return
    if closed:
        columns.foot += tail
        return
    if not reader.last(tail):
        columns.warnings.append(("truncated", "the event array is not closed: the file was cut, later events are lost"))
