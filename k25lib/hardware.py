"""Peaks of GPUs: memory bandwidth, matrix rates and L2, from hardware.toml."""

import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

REFERENCE = "RTX PRO 6000 Blackwell"


@dataclass(frozen=True)
class Hardware:
    """One device. Bandwidth in 10^9 bytes/s, rates in 10^12 operations/s (0: none or unknown), L2 in bytes."""

    name: str
    dram_gb_s: float
    bf16_tflop_s: float = 0.0
    fp8_tflop_s: float = 0.0
    int8_top_s: float = 0.0
    l2_bytes: int = 0
    source: str = ""
    measured: bool = False  # true: `dram_gb_s` is what the microbenchmarks reached, not a published peak

    def as_dict(self):
        """The same as a plain dict, for tables and JSON."""
        return asdict(self)


def known():
    """All listed devices, in the order in which their names are matched."""
    return [_hardware(entry) for entry in _entries()]


def find(name):
    """The listed device whose pattern is in `name` (as the driver or a user gives it), or None."""
    for entry in _entries():
        if re.search(entry["match"], name, re.IGNORECASE):
            return _hardware(entry)
    return None


def _entries():
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["gpu"]


def _hardware(entry):
    fields = {key: value for key, value in entry.items() if key not in ("match", "l2_mib")}
    return Hardware(**fields, l2_bytes=entry["l2_mib"] * 2**20)
