"""nibblas: matrix multiplication for 4-bit block-scaled floats (NVFP4, MXFP4) in PyTorch."""
