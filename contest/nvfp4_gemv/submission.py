#!POPCORN leaderboard nvfp4_gemv
"""c = a @ b for each of L NVFP4 matrices and vectors: the product of one row, in which the matrix is the weight.

Linear scales on every device: those of one row are 128 times fewer bytes than its blocked ones.
"""

import nibblas as nb


def custom_kernel(data):
    """a (M, K, L), b (128, K, L) of which row 0 counts, their scales, linear and blocked, and c (M, 1, L) to fill."""
    a, b, sfa, sfb, _, _, c = data
    matrix = nb.ScaledTensor.from_batch_last(a, sfa, nb.NVFP4)  # [L, M, K]
    vector = nb.ScaledTensor.from_batch_last(b[:1], sfb[:1], nb.NVFP4)  # [L, 1, K]
    nb.bmm(vector, matrix, out=c.permute(2, 1, 0))  # [L, 1, M]
    return c
