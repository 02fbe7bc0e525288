"""The law of a collective's time: alpha + S/B."""

import numpy as np


def fit(sizes_bytes, times_us):
    """Latency alpha (us) and bandwidth B (GB/s) of t = alpha + S/B, by least squares of the relative errors.

    Returns {"alpha_us", "gb_s", "worst"}: `worst` is the largest relative error, the sign that the law does not hold
    (another algorithm takes over). alpha and 1/B are kept from being negative. None for fewer than three sizes.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_us, float)
    if len(np.unique(sizes)) < 3:
        return None
    terms = np.column_stack([1 / times, sizes / times])
    ones = np.ones(len(times))
    (alpha, slope), *_ = np.linalg.lstsq(terms, ones, rcond=None)
    if slope < 0 or alpha < 0:  # the best fit on the border: one of the two alone
        kept = 0 if slope < 0 else 1
        value = terms[:, kept] @ ones / (terms[:, kept] @ terms[:, kept])
        alpha, slope = (value, 0.0) if kept == 0 else (0.0, value)
    errors = np.abs(terms @ [alpha, slope] - 1)
    return {"alpha_us": float(alpha), "gb_s": float(1 / slope / 1e3) if slope else None, "worst": float(errors.max())}
