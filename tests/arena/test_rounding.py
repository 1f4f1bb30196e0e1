"""One rounding from float64 to narrower floats: against every value of the narrow type, and against numpy."""

import doctest
import math

import numpy as np
import pytest
import torch

import nibblas.arena.rounding
from nibblas.arena.rounding import round_once


def around_midpoints(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 values at, just beside and far from every midpoint of two neighbours, and what each should become."""
    codes = torch.arange(0x7F80 if dtype == torch.bfloat16 else 0x7C00, dtype=torch.int32).to(torch.int16)
    low, high = codes[:-1].view(dtype).double(), codes[1:].view(dtype).double()
    middle = (low + high) / 2
    below, above = torch.nextafter(middle, low), torch.nextafter(middle, high)
    even = torch.where(codes[:-1] % 2 == 0, low, high)
    values = torch.cat((low, below, middle, above, torch.nextafter(high, low)))
    return values, torch.cat((low, low, even, high, high))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_midpoint_and_its_neighbours(dtype):
    values, expected = around_midpoints(dtype)
    for sign in (1, -1):
        assert torch.equal(round_once(sign * values, dtype).double(), sign * expected)
    assert not torch.equal(values.to(dtype).double(), expected)  # torch's cast rounds twice; else this shows nothing


def test_numpy_agrees_about_fp16():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(200_000, dtype=torch.float64, generator=generator) * 2.0 ** torch.randint(-30, 17, (200_000,))
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(values.numpy().astype(np.float16))
    assert torch.equal(round_once(values, torch.float16), expected)
    assert expected.isinf().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_special_values_stay(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, 1e300], dtype=torch.float64)
    rounded = round_once(values, dtype)
    assert rounded.dtype == dtype
    assert torch.signbit(rounded[:2]).tolist() == [False, True]
    assert rounded[2:4].tolist() == [math.inf, -math.inf]
    assert rounded[4].isnan()
    assert rounded[5:7].tolist() == [largest, -largest]
    assert rounded[7] == (1e300 if dtype == torch.float64 else math.inf)


def test_other_dtypes_are_cast_as_torch_does():
    assert round_once(torch.tensor([1.5]), torch.float16).dtype == torch.float16


def test_examples():
    assert doctest.testmod(nibblas.arena.rounding).failed == 0
