"""What samples of times say: medians and ratios, each with its uncertainty by the bootstrap."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

RESAMPLES = 2000


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


def median_interval(samples: Sequence[float], *, confidence: float = 0.95, resamples: int = RESAMPLES) -> Interval:
    """The median with a percentile bootstrap interval; ValueError without samples.

    The same samples give the same interval.
    """
    if not samples:
        raise ValueError("median_interval: no samples, need at least one")
    low, high = _bootstrap(np.asarray(samples, dtype=float), confidence, resamples)
    return Interval(median(samples), low, high)


def paired_ratio(
    numerator: Sequence[float], denominator: Sequence[float], *, confidence: float = 0.95, resamples: int = RESAMPLES
) -> Ratio:
    """The median over rounds of numerator / denominator, with a percentile bootstrap interval over the rounds.

    Both are samples of the same rounds: paired_ratio(theirs, ours) says how many times faster ours is. ValueError where
    they differ in length or are empty. The same samples give the same interval.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            f"paired_ratio: {len(numerator)} and {len(denominator)} samples, need as many of both, at least one"
        )
    ratios = np.asarray(numerator) / np.asarray(denominator)
    low, high = _bootstrap(ratios, confidence, resamples)
    return Ratio(median(ratios.tolist()), low, high)


def _bootstrap(values: np.ndarray, confidence: float, resamples: int) -> tuple[float, float]:
    drawn = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(values[drawn], axis=1), (tail, 1 - tail))
    return float(low), float(high)
