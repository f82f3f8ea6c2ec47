"""Percentiles of latencies, and how many requests they take."""

from __future__ import annotations

from collections.abc import Sequence

P95_NEEDS = 5
"""Fewest requests that a 95th percentile is given of; of fewer it would be the slowest by another name."""


def latency_summary(seconds: Sequence[float]) -> dict[str, float | list[float] | None]:
    """`p50`, `p95` (None of fewer than `P95_NEEDS` requests) and `all`, in seconds."""
    import numpy as np

    return {
        "p50": float(np.percentile(seconds, 50)),
        "p95": float(np.percentile(seconds, 95)) if len(seconds) >= P95_NEEDS else None,
        "all": list(seconds),
    }
