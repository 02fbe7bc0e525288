"""Ranks that outgrow one machine: the same call on a Dask cluster gives the same result."""

import joblib
import pytest

from k25lib.trace.breakdown import breakdown

distributed = pytest.importorskip("distributed", reason="pip install k25lib[cluster]")


@pytest.mark.slow
def test_a_local_cluster_gives_the_same_result(c64):
    here = breakdown([c64])
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        assert breakdown([c64]) == here
