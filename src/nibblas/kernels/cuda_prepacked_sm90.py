"""What the products of dense activations with prepacked weights on Hopper share, beside cuda_linear_sm90.h."""

import torch

from nibblas.formats import MXFP4, NVFP4
from nibblas.layouts import (
    FRAGMENT_SCALES_MXFP4,
    FRAGMENT_SCALES_NVFP4,
    FRAGMENTS_MXFP4,
    FRAGMENTS_NVFP4,
)

HEADER = "cuda_linear_sm90.h"
TERMS = {torch.bfloat16: 1, torch.float16: 2}  # bf16 terms that an element of a is split into
LAYOUTS = {
    NVFP4: (FRAGMENT_SCALES_NVFP4, FRAGMENTS_NVFP4),
    MXFP4: (FRAGMENT_SCALES_MXFP4, FRAGMENTS_MXFP4),
}
MOST_BLOCKS = 65535  # of a grid along y and z


def too_many(blocks: int, L: int) -> str | None:
    """Why no grid has so many blocks of rows of a and matrices along y and z; None if one can."""
    most = max(blocks, L)
    return f"starts at most {MOST_BLOCKS} blocks of rows, or matrices; needs {most}" if most > MOST_BLOCKS else None
