import torch


def custom_kernel(data):
    a, b, c = data
    for i in range(c.shape[2]):
        torch.matmul(a[:, :, i], b[:, :, i].t(), out=c[:, :, i])
    return c
