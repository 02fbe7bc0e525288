"""Captures that several tests of the trace engine read: made or cut once."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
sys.path.insert(0, str(HERE))  # generate.py


@pytest.fixture(scope="session")
def c1():
    return PROJECT / "data" / "sample" / "captures" / "h200x2-tp2-c1-20steps"


@pytest.fixture(scope="session")
def c64():
    return PROJECT / "data" / "sample" / "captures" / "h200x2-tp2-c64"


@pytest.fixture(scope="session")
def cpu():
    return HERE / "captures" / "cpu-tp2"


@pytest.fixture(scope="session")
def dp():
    return HERE / "captures" / "dp2-ep"


@pytest.fixture(scope="session")
def damaged():
    return HERE / "damaged"
