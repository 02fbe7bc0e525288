"""`k25 shapes`."""

import json
from pathlib import Path

import pytest

from k25lib.cli import main

CONFIG = str(Path(__file__).parents[2] / "data/reference/kimi-k2.5/config.json")


def test_json(capsys):
    assert main(["shapes", CONFIG, "--tp", "8", "--batch", "1", "--hardware", "RTX PRO 6000", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["architecture"]) == ("k25.shapes/1", "KimiK25ForConditionalGeneration")
    assert {"name", "n", "k", "matrices", "dtype", "calls_per_step", "bytes_per_step"} <= set(result["gemms"][0])
    assert {"op", "bytes", "calls_per_step"} <= set(result["collectives"][0])
    assert result["weight_bytes_read_per_step"] == 6030145536
    assert result["kv_bytes_per_token"] == 70272
    assert round(result["ideal_step_ms"], 3) == 3.365


def test_context_adds_the_kv_cache(capsys):
    assert main(["shapes", CONFIG, "--tp", "8", "--context", "1536", "--dram-gb-s", "1597", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert round(result["ideal_step_ms"] / 12.1, 3) == 0.318


def test_text_has_the_sum_and_its_bandwidth(capsys):
    assert main(["shapes", CONFIG, "--tp", "8", "--hardware", "B200"]) == 0
    text = capsys.readouterr().out
    assert "6.030 GB a step" in text
    assert "at 8.000 TB/s (B200, peak)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "tp may be 1, 2, 4, 8, 16, 32"),
        (["--hardware", "abacus"], "'abacus' is not listed"),
        (["--dram-gb-s", "0"], "must be a positive number"),
        (["--dram-gb-s", "inf"], "must be a positive number"),
        (["--override", "a=b"], "whole number"),
        (["--override", "hidden_size=²"], "whole number"),
        (["--override", "num_hidden_layer=2"], "no such key"),
    ],
)
def test_usage_errors_are_one_line(capsys, words, message):
    assert main(["shapes", CONFIG, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
