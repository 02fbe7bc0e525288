"""`k25 reference`: published campaigns, examined."""

import json

from k25lib.cli import main


def test_list(capsys):
    assert main(["reference"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "glm-5-sglang                 8x RTX PRO 6000, GLM-5 NVFP4",
        "rtx-pro-6000-kimi-k2.5       8x RTX PRO 6000, Kimi-K2.5 INT4",
    ]


def test_the_campaign_as_text(capsys):
    assert main(["reference", "rtx-pro-6000-kimi-k2.5"]) == 0
    text = capsys.readouterr().out
    assert "127 calls a step = 123 x 160 / 155" in text
    assert "DRAM efficiency 27.8 %" in text
    assert "weights alone, at 1.567 TB/s" in text
    assert "would save -5.36 to +3.54 ms a step (-44.3 to +29.3 % of TPOT)" in text
    for saving in ("+3.54", "+2.40", "+1.07", "-0.24"):
        assert f"  {saving} ms  " in text


def test_the_campaign_as_json(capsys):
    assert main(["reference", "rtx-pro-6000-kimi-k2.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "k25.reference/1"
    assert len(found["contradictions"]) == 4
    assert [row["category"] for row in found["next"]] == ["allreduce", "attention", "other_gemm", "moe_gemm"]


def test_a_campaign_of_few_figures(capsys):
    assert main(["reference", "glm-5-sglang"]) == 0
    assert "dtype_cast: 69 %, then 69 % of the rest" in capsys.readouterr().out


def test_an_unknown_campaign(capsys):
    assert main(["reference", "none"]) == 2
    assert "there are glm-5-sglang, rtx-pro-6000-kimi-k2.5" in capsys.readouterr().err
