"""Words for numbers."""

import pytest

from nibblas.words import time_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (2.5e-10, "0.250 ns"),
        (1.234e-6, "1.23 us"),
        (12.34e-6, "12.3 us"),
        (812e-6, "812 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (10.36e-3, "10.4 ms"),
        (0.25, "250 ms"),
        (0.99999, "1.00 s"),
        (2, "2.00 s"),
        (1234.5, "1230 s"),
        (float("inf"), "inf s"),
    ],
)
def test_times_are_rounded_before_their_unit_is_chosen(seconds, text):
    assert time_text(seconds) == text


def test_times_in_more_digits():
    assert [time_text(seconds, digits=4) for seconds in (1e-3, 0.99994, 0.99996)] == ["1.000 ms", "999.9 ms", "1.000 s"]
