"""The types of the problem: what custom_kernel takes and returns, and what a case says."""

from typing import TypedDict, TypeVar

from torch import Tensor

input_t = TypeVar("input_t", bound=tuple[Tensor, Tensor, Tensor])  # x, codes, scales
output_t = TypeVar("output_t", bound=Tensor)


class TestSpec(TypedDict):
    m: int
    n: int
    k: int
    seed: int
