import torch


def custom_kernel(data):
    x, weights, scales, offset, config = data
    act = {"relu": torch.relu, "tanh": torch.tanh}[config.kind]
    for weight, scale in zip(weights.values(), scales, strict=True):
        x = act((x @ weight).mul(scale))
    x = x.mul(config.factor)
    return x if offset is None else x + offset, x.max(-1).indices
