"""Text files that others may be reading: replaced whole, never half written."""

import os
from pathlib import Path


def write_text(target, text):
    """Write `text` (UTF-8) to `target`, whole or not at all; the size in bytes."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8", errors="replace")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return len(data)
