"""Files that others may be reading: replaced whole, never half written."""

import os
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(target):
    """Yields a path to write to, which takes the place of `target` at the block's end, and goes if the block fails."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_text(target, text):
    """Write `text` (UTF-8) to `target`, whole or not at all; returns its size in bytes."""
    data = text.encode("utf-8", errors="replace")
    with whole(target) as part:
        part.write_bytes(data)
    return len(data)
