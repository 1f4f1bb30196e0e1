"""Turn the linear layers of a model to FP4, run it, save it and load it again."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nibblas as nb


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


torch.manual_seed(0)
dense = mlp()
x = torch.randn(8, 256)
before = dense(x)

model = nb.nn.convert(dense, nb.NVFP4, scale_rule="search")
print(model)
print(f"relative error of the output: {(model(x) - before).norm() / before.norm():.3f}")

path = Path(tempfile.mkdtemp()) / "model.safetensors"
save_file(model.state_dict(), path)
print(f"{path.stat().st_size} bytes on disk; {4 * sum(p.numel() for p in mlp().parameters())} in fp32")

again = nb.nn.convert(mlp(), nb.NVFP4, scale_rule="search")
again.load_state_dict(load_file(path))
assert torch.equal(again(x), model(x))
