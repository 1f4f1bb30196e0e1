"""Where code that was built for a target runs."""

import pytest

from nibblas.targets import runs

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
