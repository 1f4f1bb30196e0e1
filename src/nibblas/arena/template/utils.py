"""What the reference and submissions share."""

import torch
from torch import Tensor

BLOCK_SIZE = 32  # elements along K that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an MXFP4 matrix: codes (N, K/2) and scales (N, K/32) -> (N, K) of dtype."""
    table = torch.tensor(E2M1, dtype=dtype, device=codes.device)
    pairs = codes.view(torch.uint8)
    values = table[torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2).int()]
    multipliers = torch.exp2(scales.view(torch.uint8).to(dtype) - 127)
    return values * multipliers.repeat_interleave(BLOCK_SIZE, dim=-1)


def check_close(output: Tensor, exact: Tensor, size: Tensor, tolerance: float) -> tuple[bool, str]:
    """Whether each element is within tolerance * (|exact| + size) of the exact one, and what is wrong if not.

    `size` is how large a sum would be if its signs were random. Unlike the element it doesn't cancel, and unlike an
    absolute bound it is right for inputs of any magnitude.
    """
    if output.shape != exact.shape:
        return False, f"the shape is {tuple(output.shape)}, need {tuple(exact.shape)}"
    if not output.isfinite().all():
        return False, f"{int((~output.isfinite()).sum())} elements are not finite"
    error = (output.to(exact.dtype) - exact).abs() / (exact.abs() + size)
    worst = error.argmax()
    largest = f"the largest error is {float(error.flatten()[worst]):.2g} of magnitude and size, allowed {tolerance:.2g}"
    if error.flatten()[worst] <= tolerance:
        return True, largest
    row, col = divmod(int(worst), error.shape[1])
    return False, f"y[{row}, {col}] is {output[row, col]:.6g}, need {exact[row, col]:.6g}; {largest}"
