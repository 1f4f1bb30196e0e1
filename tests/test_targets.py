"""Where code that was built for a target runs."""

import pytest

from nibblas.targets import Target, parsed, runs

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
ARCHS = ("cpu", *NVIDIA, "gfx942", "gfx950")


@pytest.mark.parametrize(
    ("target", "on"),
    [
        ("sm_80", {"sm_80", "sm_86", "sm_89"}),
        ("sm_86", {"sm_86", "sm_89"}),
        ("sm_90", {"sm_90"}),
        ("sm_90a", {"sm_90"}),
        ("sm_100a", {"sm_100"}),
        ("sm_100f", {"sm_100", "sm_103"}),
        ("sm_103f", {"sm_103"}),
        ("compute_90", {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}),
        ("compute_90a", {"sm_90"}),
        ("compute_100f", {"sm_100", "sm_103"}),
        ("compute_120f", {"sm_120", "sm_121"}),
        ("sm_100+", {"sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}),
        ("gfx942", {"gfx942"}),
        ("something", set()),
    ],
)
def test_runs(target, on):
    assert {arch for arch in ARCHS if runs(target, arch)} == on


def test_parsed():
    assert parsed("sm_90") == Target("sm", 90, "")
    assert parsed("sm_100+") == Target("sm", 100, "+")
    assert parsed("compute_120f") == Target("compute", 120, "f")
    assert [parsed(name) for name in ("gfx950", "cpu", "lto_90", "sm_90x", "sm_" + "9" * 5000)] == [None] * 5
