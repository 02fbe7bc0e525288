"""The client's test of itself."""

import pytest

from k25lib.load import selftest

GOOD = {"tpot_mean_error_percent": 0.01, "tpot_p99_error_percent": 0.05, "lag_ms_p99": 0.1, "cpu_us_per_token": 8.0}


@pytest.mark.parametrize(
    ("more", "honest"),
    [
        ({}, True),
        ({"tpot_mean_error_percent": -0.3}, False),
        ({"tpot_p99_error_percent": 5.0}, False),
        ({"true_in_flight_mean": 97.0}, False),
    ],
)
def test_what_honest_means(more, honest):
    assert selftest.honest(GOOD | {"concurrency": 100, "true_in_flight_mean": 99.5} | more) is honest


def test_errors_are_the_clients_figures_beside_the_truth():
    found = selftest.errors([((50, 12.0), (50, 12)), ((52, 12.6), (50, 12)), ((60, 12.0), (50, 12))])
    assert found["tpot_mean_error_percent"] == pytest.approx(100 * 0.2 / 12)
    assert found["ttft_p50_error_percent"] == pytest.approx(4)
    assert found["tpot_p99_error_percent"] == pytest.approx(100 * (0.98 * 0.6) / 12)


def test_the_highest_honest_concurrency_is_found_from_above(monkeypatch):
    def fidelity(url, concurrency, rounds):
        return GOOD | {"concurrency": concurrency, "honest": concurrency <= 128, "stamps": "kernel"}

    monkeypatch.setattr(selftest, "fidelity", fidelity)
    said = []
    found = selftest.selftest(512, said.append)
    assert found["honest_concurrency"] == 128 and len(found["steps"]) == len(said) == 3
    assert (found["lag_ms_p99"], found["cpu_us_per_token"], found["stamps"]) == (0.1, 8.0, "kernel")


@pytest.mark.slow
def test_the_real_thing():
    found = selftest.selftest(1)
    assert found["honest_concurrency"] >= 1 and found["cpu_us_per_token"] > 0
