"""Is a change real? Statistics of values of which each is a mean over one restart of a server.

A restart is the unit of repetition, not a request. The spread between restarts is pooled over all runs: the centre
moves from one configuration to another, the scatter between restarts hardly does. Changes are relative (logarithms),
so 5 % is 5 % at any level.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
POWER = 0.8
LEAST = 0.01  # a change under 1 % is the same, however surely it is there


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the logarithm between restarts, and the degrees of freedom it rests on."""

    sd: float
    df: int


def pooled_spread(groups):
    """The spread pooled over groups of values, one value a restart; None where no group has two."""
    logs = [np.log(np.asarray(values, float)) for values in groups if len(values) > 1]
    df = sum(len(x) - 1 for x in logs)
    if not df:
        return None
    return Spread(float(np.sqrt(sum(((x - x.mean()) ** 2).sum() for x in logs) / df)), df)


def change(before, after, spread, lower_is_better=True, confidence=CONFIDENCE):
    """Relative change from `before` to `after` (values, one a restart), its interval and a verdict.

    {"change_percent", "low_percent", "high_percent", "verdict", "smallest_visible_percent"}: the verdict is better,
    worse, same (the interval is within 1 % of none) or unclear. Better and worse together have a false-alarm rate of
    at most 1 - `confidence`. Without a spread the verdict is unclear.
    """
    a, b = np.log(np.asarray(before, float)), np.log(np.asarray(after, float))
    middle = float(b.mean() - a.mean())
    found = {"change_percent": percent(middle), "low_percent": None, "high_percent": None, "verdict": "unclear"}
    if spread is None:
        return found | {"smallest_visible_percent": None}
    half = float(stats.t.ppf(0.5 + confidence / 2, spread.df)) * spread.sd * (1 / len(a) + 1 / len(b)) ** 0.5
    low, high = np.expm1(middle - half), np.expm1(middle + half)
    if low > -LEAST and high < LEAST:
        found["verdict"] = "same"
    elif low > 0 and np.expm1(middle) > LEAST:
        found["verdict"] = "worse" if lower_is_better else "better"
    elif high < 0 and np.expm1(middle) < -LEAST:
        found["verdict"] = "better" if lower_is_better else "worse"
    found |= {"low_percent": percent(middle - half), "high_percent": percent(middle + half)}
    return found | {"smallest_visible_percent": 100 * smallest_visible(spread, len(a), len(b), confidence)}


def smallest_visible(spread, before=1, after=1, confidence=CONFIDENCE):
    """The relative change that so many restarts on each side would show four times in five."""
    k = stats.t.ppf(0.5 + confidence / 2, spread.df) + stats.t.ppf(POWER, spread.df)
    return max(float(np.expm1(k * spread.sd * (1 / before + 1 / after) ** 0.5)), LEAST)


def restarts_for(spread, wanted, confidence=CONFIDENCE):
    """Restarts a side that a relative change of `wanted` needs to be seen four times in five; None above 100."""
    for n in range(1, 101):
        known = Spread(spread.sd, max(spread.df, 2 * (n - 1)))  # the restarts themselves make the spread better known
        if smallest_visible(known, n, n, confidence) <= wanted:
            return n
    return None


def mean(values):
    """The geometric mean: the change between two of them is `change`'s."""
    return float(np.exp(np.log(values).mean()))


def percent(log_change):
    """A change of a logarithm as percent of the value."""
    return 100 * float(np.expm1(log_change))
