"""One rounding from float64, which torch's own casts don't give: they go through fp32 and round twice."""

import torch
from torch import Tensor


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values in another float dtype, each rounded once, to nearest even.

    By way of an fp32 that is rounded to odd: of the two neighbours of an inexact value the one whose last bit is set,
    from which every narrower dtype rounds as from the value itself.

    >>> x = torch.tensor([1 + 2**-11 + 2**-30], dtype=torch.float64)
    >>> x.to(torch.float16).item(), round_once(x, torch.float16).item()
    (1.0, 1.0009765625)
    """
    if values.dtype != torch.float64 or dtype in (torch.float64, torch.float32):
        return values.to(dtype)
    nearest = values.float()
    back = nearest.double()
    beyond = torch.where(values > back, torch.inf, -torch.inf).float()
    is_odd = nearest.view(torch.int32) & 1 == 1
    keeps = is_odd | (values == back) | ~values.isfinite() | ~nearest.isfinite()
    return torch.where(keeps, nearest, torch.nextafter(nearest, beyond)).to(dtype)
