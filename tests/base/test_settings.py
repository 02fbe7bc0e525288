"""campaign.toml and overrides: one checked Settings, errors that list what there is."""

import pytest

from k25lib.errors import UsageError
from k25lib.run import PROJECT
from k25lib.settings import check_parameters, from_tree, load_settings, to_tree

CAMPAIGN = PROJECT / "campaign.toml"


def test_override_wins_over_the_embedded_values_too():
    settings = load_settings(CAMPAIGN, ["macro.concurrency=[1, 3]"])
    assert settings.parameters("macro", embedded=True)["concurrency"] == [1, 3]
    assert settings.parameters("macro", embedded=False)["concurrency"] == [1, 3]


def test_embedded_values_are_used_only_with_the_embedded_server():
    settings = load_settings(CAMPAIGN)
    assert settings.parameters("macro", embedded=False)["concurrency"] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert max(settings.parameters("macro", embedded=True)["concurrency"]) < 128


def test_bare_words_are_strings_and_toml_values_keep_their_type():
    settings = load_settings(CAMPAIGN, ["server.url=http://x:1", "server.tp=8", "campaign.keep_captures=false"])
    assert (settings.server.url, settings.server.tp, settings.campaign.keep_captures) == ("http://x:1", 8, False)


def test_a_manifest_gives_the_same_settings_back():
    settings = load_settings(CAMPAIGN, ["macro.seed=7", "server.tp=2"])
    assert from_tree(to_tree(settings)) == settings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("macr.x=1", ["'macr'", "did you mean macro?", "collectives"]),
        ("server.uri=1", ["'uri'", "did you mean url?", "traces"]),
        ("campaign.cell_timeout_s=true", ["campaign.cell_timeout_s must be int, not True"]),
        ("server.tp=eight", ["server.tp must be int, not 'eight'"]),
        ("campaign.name=a/b", ["campaign.name names files"]),
        ("concurrency", ["--set takes table.key=value"]),
        ("macro.=3", ["--set takes table.key=value"]),
        ("embedded.macro=5", ["[embedded.macro] must be a table"]),
        ("macro.run=x", ["a campaign gives all of them its own run"]),
        ("campaign.cell_timeout_s=0", ["cell_timeout_s is at least 1"]),
        ("server.busy_wait_s=-1", ["not negative"]),
    ],
)
def test_bad_overrides_say_what_there_is(override, words):
    with pytest.raises(UsageError) as error:
        load_settings(CAMPAIGN, [override])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["macro = 5", "embedded = 5", "[embedded]\nmacro = 5"])
def test_an_override_of_what_is_no_table_is_one_line(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="must be a table of campaign.toml, not 5"):
        load_settings(path, ["macro.seed=1"])


def test_a_folder_is_no_campaign_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read the campaign file .*: Is a directory"):
        load_settings(tmp_path)


@pytest.mark.parametrize("text", ["[campaign", "campaign = 3", "[embedded.nothing]\nx = 1", "macro = [1]"])
def test_a_broken_file_is_one_line(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_settings(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="no campaign file"):
        load_settings(tmp_path / "none.toml")


def test_parameters_are_checked_by_name_and_type():
    declared = {"concurrency": "list", "seed": "int", "rate": "float", "flag": "bool", "slo": "None"}
    check_parameters(declared, {"rate": 3, "slo": "anything", "flag": False}, "macro")
    for name, value in [("seed", "7"), ("seed", True), ("flag", 1), ("concurrency", 3), ("rate", "fast")]:
        with pytest.raises(UsageError, match=f"macro.{name} must be"):
            check_parameters(declared, {name: value}, "macro")
    with pytest.raises(UsageError, match="did you mean seed"):
        check_parameters(declared, {"sed": 1}, "macro")


def test_the_profiler_is_one_of_two():
    assert from_tree({}).profiler == "torch"
    assert from_tree({"capture": {"profiler": "nsys"}}).profiler == "nsys"
    with pytest.raises(UsageError, match="capture.profiler is torch or nsys, not 'ncu'"):
        from_tree({"capture": {"profiler": "ncu"}})
