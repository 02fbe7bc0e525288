import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k25lib.micro import timing


def test_summary_of_known_samples():
    row = timing.summary([10.0, 12.0, 11.0, 13.0, 50.0])
    assert (row["time_us_median"], row["time_us_min"], row["time_us_iqr"]) == (12.0, 10.0, 2.0)
    assert row["samples"] == 5
    assert row["noisy"]  # 2 of 12 is over 10 %


def test_a_steady_row_is_not_noisy():
    assert not timing.summary([100.0, 101.0, 102.0, 103.0])["noisy"]


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [math.inf]])
def test_no_number_comes_of_bad_samples(samples):
    with pytest.raises(ValueError, match="no samples|not positive"):
        timing.summary(samples)


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=40))
def test_summary_is_ordered_and_finite(samples):
    row = timing.summary(samples)
    assert min(samples) == row["time_us_min"] <= row["time_us_median"] <= max(samples)
    assert 0 <= row["time_us_iqr"] <= max(samples) - min(samples)


def test_relative_errors_by_hand():
    mean, largest = timing.relative_errors(torch.tensor([1.0, 2.0, 3.0, 4.5]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert mean == pytest.approx(0.5 / 10)
    assert largest == pytest.approx(0.5 / 4)


def test_a_non_finite_output_is_infinitely_wrong():
    assert timing.relative_errors(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])) == (math.inf, math.inf)


def test_fatal_errors_are_told_from_others():
    assert timing.is_fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not timing.is_fatal(RuntimeError("CUDA out of memory"))


def test_times_of_a_cpu_launch_are_per_launch():
    calls = []
    samples, timer = timing.sample_cpu([lambda: calls.append(1)] * 4, 0.01)
    assert timer == "clock"
    assert len(samples) >= 5
    assert all(s > 0 for s in samples)
    assert len(calls) % 4 == 0
