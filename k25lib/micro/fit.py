"""The law of a collective's time: alpha + S/B."""

import numpy as np
from scipy.optimize import nnls


def fit(sizes_bytes, times_us):
    """Latency alpha (us) and bandwidth B (GB/s) of t = alpha + S/B, by least squares of the relative errors.

    Returns {"alpha_us", "gb_s", "worst"}: `worst` is the largest relative error, the sign that the law does not hold
    (another algorithm takes over). Neither alpha nor 1/B comes out negative; `gb_s` is None where 1/B is 0. None for
    fewer than three sizes.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_us, float)
    if len(np.unique(sizes)) < 3:
        return None
    terms = np.column_stack([1 / times, sizes / times])
    (alpha, slope), _ = nnls(terms, np.ones(len(times)))
    errors = np.abs(terms @ [alpha, slope] - 1)
    return {"alpha_us": float(alpha), "gb_s": float(1 / slope / 1e3) if slope else None, "worst": float(errors.max())}
