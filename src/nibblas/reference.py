"""The oracle: what every product of nibblas should be, in float64 and plain torch, on any device.

A block-scaled element is `e2m1 * scale * global_scale`, exact in float64; no step rounds to fp32, so an error measured
against these functions is the kernel's own. They are slow and hold a chunk of rows of the weight in float64 at a time.
An operand is a dense Tensor of any float dtype or a ScaledTensor in any layout; a result is a float64 Tensor.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from nibblas.formats import e2m1_decode, unpack
from nibblas.layouts import LINEAR
from nibblas.tensor import ScaledTensor

Operand = Tensor | ScaledTensor

ACTIVATIONS = ("silu", "swiglu_clamped")

_CHUNK_BYTES = 64 * 2**20  # of float64 weight held at a time


def to_float64(t: Operand) -> Tensor:
    """The values of a tensor: (..., K) dense or block-scaled -> (..., K) float64.

    Every element of a block whose scale is NaN is NaN. A rotation is inverted: the result is the tensor as it was
    before the Hadamard transform, which spreads a NaN over the elements that were mixed with it.
    """
    if isinstance(t, Tensor):
        if not t.is_floating_point() or t.dtype == torch.float4_e2m1fn_x2:
            raise TypeError(f"to_float64: the tensor has dtype {t.dtype}, need a float dtype or a ScaledTensor")
        return t.double()
    block_size = t.format.block_size
    codes = e2m1_decode(unpack(t.linear_data)).double()
    scale = t.format.scale_code.decode(t.linear_scale).double()
    values = (codes.unflatten(-1, (t.K // block_size, block_size)) * scale[..., None]).flatten(-2)  # [..., K]
    if t.global_scale is not None:
        per_matrix = t.global_scale.ndim > 0
        values = values * (t.global_scale[..., None, None] if per_matrix else t.global_scale).double()
    if t.rotation:
        mixed = values.unflatten(-1, (t.K // t.rotation, t.rotation))
        values = (mixed @ _hadamard(t.rotation, values.device)).flatten(-2)
    return values


def _hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix in Sylvester's order, its own inverse: (size, size) float64."""
    signs = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(signs) < size:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return signs / math.sqrt(size)


def matmul(a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
    """c = a @ b.T + bias, batch dimensions broadcast as in torch.matmul.

    a : (..., M, K). b : (..., N, K). bias : (N,), or (..., N) with one row a matrix.
    Returns (..., M, N). ValueError where the shapes don't fit.

    >>> matmul(torch.ones(1, 3), torch.ones(2, 3), bias=torch.tensor([0.0, 1.0]))
    tensor([[3., 4.]], dtype=torch.float64)
    """
    return _add_bias("matmul", _product("matmul", a, b), bias)


def magnitude(a: Operand, b: Operand) -> Tensor:
    """How large each element of matmul(a, b) would be if signs were random: sqrt(a**2 @ (b**2).T), (..., M, N).

    Unlike the element itself it does not cancel, so it is what an error of a sum can be compared with.
    """
    return _product("magnitude", a, b, torch.square).sqrt()


def _product(op: str, a: Operand, b: Operand, of: Callable[[Tensor], Tensor] = lambda values: values) -> Tensor:
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"{op}: a is {tuple(a.shape)} and b is {tuple(b.shape)}, need (..., M, K) and (..., N, K)")
    values = of(to_float64(a))
    return torch.cat([values @ of(rows).mT for rows in _row_chunks(b)], dim=-1)


def _row_chunks(b: Operand) -> Iterator[Tensor]:
    """The rows of (..., N, K) in float64, as many at a time as fit in _CHUNK_BYTES; one empty chunk if N is 0."""
    N = b.shape[-2]
    row_bytes = 8 * math.prod((*b.shape[:-2], b.shape[-1]))
    step = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
    b = _plain(b)
    for start in range(0, max(N, 1), step):
        end = min(start + step, N)
        yield to_float64(b.slice(-2, start, end) if isinstance(b, ScaledTensor) else b[..., start:end, :])


def _plain(t: Operand) -> Operand:
    """In row-after-row layouts, of which a slice is a view."""
    return t if isinstance(t, Tensor) else t.with_layout(LINEAR, LINEAR)


def _add_bias(op: str, c: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return c
    if bias.ndim < 1 or bias.shape[-1] != c.shape[-1]:
        raise ValueError(f"{op}: bias is {tuple(bias.shape)}, need (..., {c.shape[-1]})")
    return c + to_float64(bias)[..., None, :]


def linear(x: Operand, w: Operand, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias: x (..., K), w (N, K), bias (N,) -> (..., N).

    A batched w (..., N, K) meets x (..., M, K) as in `matmul`.
    """
    return matmul(to_float64(x)[None], w, bias)[0]


def gemv(a: Operand, b: Operand) -> Tensor:
    """Matrix times vector, batched: a (..., M, K), b (..., K) -> (..., M)."""
    if b.ndim < 1 or a.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"gemv: a is {tuple(a.shape)} and b is {tuple(b.shape)}, need (..., M, K) and (..., K)")
    return matmul(to_float64(b)[..., None, :], a)[..., 0, :]


def grouped_linear(x: Operand, w: Operand, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows offsets[g]:offsets[g+1] of x meet w[g]; a group may be empty, and rows of no group become zero.

    x : (T, K). w : (G, N, K). offsets : (G+1,) integers within 0..T, never falling. bias : (G, N).
    Returns (T, N). ValueError where offsets or shapes don't fit.
    """
    if w.ndim != 3 or x.ndim != 2:
        raise ValueError(f"grouped_linear: x is {tuple(x.shape)}, w is {tuple(w.shape)}, need (T, K) and (G, N, K)")
    G, N, _ = w.shape
    boundaries = offsets.tolist()
    T = x.shape[0]
    if len(boundaries) != G + 1 or boundaries != sorted(boundaries) or boundaries[0] < 0 or boundaries[-1] > T:
        raise ValueError(f"grouped_linear: offsets are {boundaries}, need {G + 1} numbers that rise within 0..{T}")
    if bias is not None and bias.shape != (G, N):
        raise ValueError(f"grouped_linear: bias is {tuple(bias.shape)}, need {(G, N)}")
    x, w = to_float64(x), _plain(w)
    out = x.new_zeros(T, N)
    for g, (start, end) in enumerate(pairwise(boundaries)):
        out[start:end] = linear(x[start:end], _member(w, g), None if bias is None else bias[g])
    return out


def _member(w: Operand, g: int) -> Operand:
    """Matrix g of (G, N, K) as (1, N, K)."""
    return w[g : g + 1] if isinstance(w, Tensor) else w.slice(0, g, g + 1)


def grouped_matmul(list_a: list[Operand], list_b: list[Operand]) -> list[Tensor]:
    """One product a pair, each of its own shape: [(M_g, K_g)], [(N_g, K_g)] -> [(M_g, N_g)]."""
    return [matmul(a, b) for a, b in zip(list_a, list_b, strict=True)]


def gated_activation(
    gate: Tensor, up: Tensor, activation: str = "silu", *, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """act(gate) * up, elementwise in float64.

    "silu" : gate * sigmoid(gate) * up.
    "swiglu_clamped" : gate * sigmoid(alpha * gate) * (up + 1) with gate <= limit and -limit <= up <= limit (gpt-oss);
    alpha and limit belong to it alone.
    """
    gate, up = to_float64(gate), to_float64(up)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    raise ValueError(f"gated_activation: activation is {activation!r}, need one of {', '.join(ACTIVATIONS)}")


def gated_linear(
    x: Operand,
    w_gate: Operand,
    w_up: Operand,
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    activation: str = "silu",
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up): x (..., K), w_gate and w_up (N, K) -> (..., N).

    Batched weights are taken as in `linear`; activations are those of `gated_activation`.
    """
    gate, up = linear(x, w_gate, bias_gate), linear(x, w_up, bias_up)
    return gated_activation(gate, up, activation, alpha=alpha, limit=limit)


def moe(
    x: Operand,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w_gate: Operand,
    w_up: Operand,
    w_down: Operand,
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    activation: str = "silu",
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    of_hidden: Callable[[Tensor], Operand] = lambda hidden: hidden,
) -> Tensor:
    """A mixture of gated experts: each token is the weighted sum of what its experts make of it, biases included.

    x : (T, H). expert_ids : (T, top_k) integers 0..E-1, or -1 for no expert. expert_weights : (T, top_k) float.
    w_gate, w_up : (E, I, H). w_down : (E, H, I). bias_gate, bias_up : (E, I). bias_down : (E, H).
    of_hidden : what w_down meets of the gated activations of all tokens and experts, (rows, I) float64: a quantizer.
    Returns (T, H). ValueError where shapes don't fit or an id is out of range.
    """
    E = w_down.shape[0]
    if expert_ids.ndim != 2 or expert_ids.shape != expert_weights.shape or len(expert_ids) != x.shape[0]:
        raise ValueError(
            f"moe: x is {tuple(x.shape)}, expert_ids {tuple(expert_ids.shape)}, expert_weights "
            f"{tuple(expert_weights.shape)}, need (T, H), (T, top_k) and (T, top_k)"
        )
    if ((expert_ids < -1) | (expert_ids >= E)).any():
        raise ValueError(f"moe: expert_ids reach from {expert_ids.min()} to {expert_ids.max()}, need -1 to {E - 1}")

    x, expert_weights = to_float64(x), to_float64(expert_weights)
    w_gate, w_up, w_down = _plain(w_gate), _plain(w_up), _plain(w_down)
    out = x.new_zeros(x.shape[0], w_down.shape[-2])
    places = ((e, (expert_ids == e).nonzero(as_tuple=True)) for e in range(E))
    chosen = [(e, token, slot) for e, (token, slot) in places if len(token)]
    if not chosen:
        return out
    hidden = [
        gated_linear(
            x[token],
            _member(w_gate, e),
            _member(w_up, e),
            None if bias_gate is None else bias_gate[e],
            None if bias_up is None else bias_up[e],
            activation,
            alpha=alpha,
            limit=limit,
        )
        for e, token, _ in chosen
    ]
    rows = to_float64(of_hidden(torch.cat(hidden))).split([len(token) for _, token, _ in chosen])
    for (e, token, slot), values in zip(chosen, rows, strict=True):
        y = linear(values, _member(w_down, e), None if bias_down is None else bias_down[e])
        out.index_add_(0, token, expert_weights[token, slot, None] * y)
    return out
