"""What samples of times say: medians and ratios, each with its uncertainty by the bootstrap."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width over the value."""
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True)
class Ratio(Interval):
    """A ratio of times with its confidence interval; prints as "3.21x (3.10-3.33)"."""

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f}-{self.high:.2f})"


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, interpolated between samples."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The median with its percentile bootstrap interval; ValueError without samples."""
    if not samples:
        raise ValueError("median_interval: no samples, need at least one")
    low, high = _bootstrap(np.asarray(samples, dtype=float), confidence)
    return Interval(median(samples), low, high)


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], *, confidence: float = 0.95) -> Ratio:
    """The median over rounds of numerator / denominator, with a percentile bootstrap interval over the rounds.

    Both are samples of the same rounds: paired_ratio(theirs, ours) says how many times faster ours is. ValueError where
    they differ in length or are empty.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            f"paired_ratio: {len(numerator)} and {len(denominator)} samples, need as many of both, at least one"
        )
    ratios = np.asarray(numerator) / np.asarray(denominator)
    low, high = _bootstrap(ratios, confidence)
    return Ratio(median(ratios.tolist()), low, high)


def _bootstrap(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """The percentile interval of the medians of all resamples, counted rather than drawn.

    Of n values in order, the r-th of a resample is at most the k-th of them if r or more of its n draws are, with the
    probability that a binomial (n, k / n) reaches r. Of an even number both middle ones count, each for its end.
    """
    ordered, n, tail = np.sort(values), len(values), (1 - confidence) / 2
    low, high = _place(n, (n + 1) // 2, tail), _place(n, n // 2 + 1, 1 - tail)
    return float(ordered[low - 1]), float(ordered[high - 1])


def _place(n: int, r: int, probability: float) -> int:
    """The least k for which a binomial (n, k / n) reaches r with this probability."""
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))  # of factorials
    reached = np.arange(r, n + 1)
    combinations = logs[n] - logs[reached] - logs[n - reached]

    def is_enough(k: int) -> bool:
        p = k / n
        return k == n or np.exp(combinations + reached * np.log(p) + (n - reached) * np.log1p(-p)).sum() >= probability

    return bisect_left(range(1, n + 1), True, key=is_enough) + 1
