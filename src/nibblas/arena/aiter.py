"""What AMD's aiter gives the MXFP4 problems, where it is not installed: the same functions from our own parts.

Values come from the float64 oracle and are rounded once; layouts are CDNA_32x8 (aiter's "e8m0 shuffle", rows padded to
256) and SHUFFLED_16x16 (its "(16,16)" weight shuffle). Arguments that the problems don't use are refused, not ignored.
Which of these replace what is listed in MODULES; `standins` puts them in place.
"""

import enum
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nibblas import reference
from nibblas.arena.products import AITER_SCALE_RULE
from nibblas.arena.rounding import round_once
from nibblas.formats import E8M0, MXFP4, e2m1_decode, unpack
from nibblas.layouts import LINEAR, CDNA_32x8, Layout, SHUFFLED_16x16
from nibblas.ops import quantize
from nibblas.tensor import ScaledTensor

SCALE_ROWS = 256  # aiter pads shuffled scales to whole runs of so many rows

dtypes = SimpleNamespace(
    fp4x2=torch.float4_e2m1fn_x2,
    fp8_e8m0=torch.float8_e8m0fnu,
    fp8=torch.float8_e4m3fn,  # as on CDNA4
    bf16=torch.bfloat16,
    fp16=torch.float16,
    fp32=torch.float32,
    i8=torch.int8,
    i32=torch.int32,
    u8=torch.uint8,
)

QuantType = enum.Enum("QuantType", ["No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128"])
ActivationType = enum.Enum("ActivationType", ["No", "Silu", "Gelu", "Swiglu"])


def _refuse(what: str) -> NotImplementedError:
    return NotImplementedError(f"nibblas' stand-in for aiter's {what}")


def dynamic_mxfp4_quant(x: Tensor, scaling_mode: str = "even") -> tuple[Tensor, Tensor]:
    """MXFP4 codes and e8m0 scales of x (rows, K): (rows, K/2) and (rows, K/32), both uint8."""
    if scaling_mode != "even":
        raise _refuse(f"dynamic_mxfp4_quant knows the scaling_mode 'even', got {scaling_mode!r}")
    quantized = quantize(x.contiguous(), MXFP4, scale_rule=AITER_SCALE_RULE)
    return quantized.data, quantized.scale


def dynamic_mxfp4_quant_typed(x: Tensor, scaling_mode: str = "even", shuffle: bool = False) -> tuple[Tensor, Tensor]:
    """The same with torch's dtypes, and with scales shuffled on demand: aiter.utility.fp4_utils.dynamic_mxfp4_quant."""
    data, scale = dynamic_mxfp4_quant(x, scaling_mode)
    scale = e8m0_shuffle(scale) if shuffle else scale
    return data.view(dtypes.fp4x2), scale.view(dtypes.fp8_e8m0)


def _per_1x32(x: Tensor, scale: None = None, quant_dtype: torch.dtype = dtypes.fp4x2, shuffle: bool = False) -> Any:
    """x (..., K) to fp4x2 (..., K/2), with scales (rows, K/32) of all rows together."""
    if scale is not None or quant_dtype != dtypes.fp4x2:
        raise _refuse(f"per_1x32 quantizer computes scales for fp4x2, got scale {scale} for {quant_dtype}")
    data, scales = dynamic_mxfp4_quant_typed(x.reshape(-1, x.shape[-1]), shuffle=shuffle)
    return data.view(*x.shape[:-1], -1), scales


def get_quant(kind: QuantType) -> Callable:
    """The quantizer of a QuantType."""
    if kind is not QuantType.per_1x32:
        raise _refuse(f"quantizers has per_1x32 alone, got {kind}")
    return _per_1x32


def e8m0_shuffle(scale: Tensor) -> Tensor:
    """Scales (rows, cols) in CDNA_32x8, rows padded to 256 and cols to 8 with zeros."""
    if scale.ndim != 2:
        raise ValueError(f"e8m0_shuffle: scale has shape {tuple(scale.shape)}, need (rows, cols)")
    rows = scale.shape[0]
    padding = math.ceil(rows / SCALE_ROWS) * SCALE_ROWS - rows
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, 0, 0, padding))
    return CDNA_32x8.to(padded).view(scale.dtype)


def e8m0_unshuffle(scale: Tensor, rows: int, cols: int) -> Tensor:
    """The (rows, cols) uint8 scales of shuffled ones, whatever their padding of rows."""
    stored_rows, stored_cols = CDNA_32x8.shape(rows, cols)
    flat = scale.view(torch.uint8).reshape(-1)
    if flat.numel() < stored_rows * stored_cols:
        raise ValueError(
            f"e8m0_unshuffle: {flat.numel()} scales can't hold ({rows}, {cols}), need {stored_rows * stored_cols}"
        )
    return CDNA_32x8.from_(flat[: stored_rows * stored_cols].view(stored_rows, stored_cols), rows, cols)


def shuffle_weight(x: Tensor, layout: tuple[int, int] = (16, 16)) -> Tensor:
    """Packed weights (..., N, K/2) in SHUFFLED_16x16; N a multiple of 16, K of 64."""
    if tuple(layout) != (16, 16):
        raise _refuse(f"shuffle_weight knows the layout (16, 16), got {layout}")
    if x.element_size() != 1 or x.shape[-2] % 16 or x.shape[-1] % 32:
        raise ValueError(f"shuffle_weight: x is {tuple(x.shape)} {x.dtype}, need bytes (..., 16 n, 32 k)")
    return SHUFFLED_16x16.to(x.view(torch.uint8)).view(x.dtype)


def mxfp4_to_f32(x: Tensor) -> Tensor:
    """Values of packed codes: (..., K/2) -> (..., K) fp32."""
    return e2m1_decode(unpack(x.view(torch.uint8)))


def e8m0_to_f32(scale: Tensor) -> Tensor:
    """Values of e8m0 scales, fp32."""
    return E8M0.decode(scale.view(torch.uint8))


def gemm_a4w4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = dtypes.bf16,
    alpha: float = 1.0,
    beta: float = 0.0,
    bpreshuffle: bool = True,
) -> Tensor:
    """A (M, K/2) times B (N, K/2), both MXFP4 with shuffled scales: (M, N) of dtype, rounded once."""
    if bias is not None or alpha != 1.0 or beta != 0.0:
        raise _refuse("gemm_a4w4 takes no bias, alpha or beta")
    b_layout = SHUFFLED_16x16 if bpreshuffle else LINEAR
    return round_once(reference.matmul(_scaled(A, A_scale), _scaled(B, B_scale, b_layout)), dtype)


def _scaled(data: Tensor, scale: Tensor, data_layout: Layout = LINEAR) -> ScaledTensor:
    """Packed codes (rows, K/2) with shuffled scales."""
    rows, cols = data.shape[0], data.shape[1] * 2 // MXFP4.block_size
    codes = data.view(torch.uint8)
    codes = codes if data_layout == LINEAR else data_layout.from_(codes, *codes.shape)
    return ScaledTensor(codes.contiguous(), e8m0_unshuffle(scale, rows, cols), MXFP4)


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: None = None,
    a2_scale: None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
) -> Tensor:
    """Each token's weighted sum of gated experts, in MXFP4 throughout.

    hidden_states : (T, H) bf16. w1 : (E, 2 I, H/2), gate rows first, and w2 : (E, H, I/2), both shuffled fp4x2 with
    shuffled scales; their last hidden_pad and intermediate_pad rows or columns are padding. topk_weight, topk_ids :
    (T, top_k). Tokens, and each expert's bf16 hidden values, are quantized to MXFP4 by the rule "even".
    Returns (T, H) of the dtype of hidden_states, rounded once.
    """
    wrong = (expert_mask, a1_scale, a2_scale) != (None, None, None) or doweight_stage1
    if wrong or activation is not ActivationType.Silu or quant_type is not QuantType.per_1x32:
        raise _refuse("fused_moe takes SiLU and per_1x32 scales of weights alone, without expert_mask")
    if w1_scale is None or w2_scale is None:
        raise ValueError("fused_moe: w1_scale and w2_scale are needed")
    experts, rows, _ = w1.shape
    inner, H = rows // 2 - intermediate_pad, w2.shape[1] - hidden_pad
    scales1 = _expert_scales(w1_scale, experts, rows, w1.shape[2])
    scales2 = _expert_scales(w2_scale, experts, w2.shape[1], w2.shape[2])
    x = _requantized(hidden_states[:, :H])
    out = x.new_zeros(len(x), H)
    for expert in topk_ids.unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (half[:inner, :H] for half in _values(w1[expert], scales1[expert]).chunk(2))
        hidden = reference.gated_linear(x[token], gate, up)
        down = _values(w2[expert], scales2[expert])[:H, :inner]
        y = _requantized(round_once(hidden, hidden_states.dtype)) @ down.T
        out.index_add_(0, token, topk_weight[token, slot, None].double() * y)
    return round_once(out, hidden_states.dtype)


def _expert_scales(scale: Tensor, experts: int, rows: int, packed: int) -> Tensor:
    cols = packed * 2 // MXFP4.block_size
    return e8m0_unshuffle(scale, experts * rows, cols).view(experts, rows, cols)


def _values(data: Tensor, scale: Tensor) -> Tensor:
    """float64 values of one expert's shuffled codes."""
    codes = data.view(torch.uint8)
    return reference.to_float64(ScaledTensor(SHUFFLED_16x16.from_(codes, *codes.shape), scale, MXFP4))


def _requantized(x: Tensor) -> Tensor:
    return reference.to_float64(quantize(x.contiguous(), MXFP4, scale_rule=AITER_SCALE_RULE))


def get_mla_metadata_info_v1(*_: Any, **__: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the six work buffers that mla_decode_fwd wants; ours needs none, so they are of size 1."""
    return [((1,), torch.int32)] * 6


def get_mla_metadata_v1(*_: Any, **__: Any) -> None:
    """Nothing: there is no schedule to plan."""


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    **plan: Any,
) -> None:
    """Attention of few queries over one shared latent head, in float64, rounded once into o.

    q : (queries, heads, D). kv_buffer : (pages, 1, 1, D), the keys, of which the first o.shape[-1] columns are the
    values. Sequence s has the queries qo_indptr[s] to qo_indptr[s+1] and the pages kv_indices[kv_indptr[s]:...]; its
    last query sees all of them, the one before all but one, and so on. q_scale and kv_scale multiply fp8 operands.
    `plan` holds the buffers of get_mla_metadata_v1 and is not read.
    """
    if page_size != 1 or nhead_kv != 1 or logit_cap:
        raise _refuse("mla_decode_fwd takes pages of one token, one head and no logit_cap")
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    of_q, of_kv = (1.0 if s is None else s.double() for s in (q_scale, kv_scale))
    tokens = kv_buffer.reshape(len(kv_buffer), -1)
    q_ends, kv_ends = qo_indptr.tolist(), kv_indptr.tolist()
    for s in range(len(q_ends) - 1):
        kv = tokens[kv_indices[kv_ends[s] : kv_ends[s + 1]].long()].double() * of_kv
        queries = q[q_ends[s] : q_ends[s + 1]].double() * (of_q * scale)
        logits = queries @ kv.T  # [queries, heads, tokens]
        seen = torch.ones(len(queries), len(kv), dtype=torch.bool, device=q.device).tril(len(kv) - len(queries))
        weights = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        o[q_ends[s] : q_ends[s + 1]] = round_once(weights @ kv[:, : o.shape[-1]], o.dtype)


# The modules that stand in for aiter's, with what each holds.
MODULES: dict[str, dict[str, Any]] = {
    "aiter": {
        "ActivationType": ActivationType,
        "QuantType": QuantType,
        "dtypes": dtypes,
        "gemm_a4w4": gemm_a4w4,
        "get_mla_metadata_info_v1": get_mla_metadata_info_v1,
        "get_mla_metadata_v1": get_mla_metadata_v1,
        "get_torch_quant": get_quant,
        "get_triton_quant": get_quant,
    },
    "aiter.fused_moe": {"fused_moe": fused_moe},
    "aiter.mla": {"mla_decode_fwd": mla_decode_fwd},
    "aiter.ops": {},
    "aiter.ops.shuffle": {"shuffle_weight": shuffle_weight},
    "aiter.ops.triton": {},
    "aiter.ops.triton.quant": {"dynamic_mxfp4_quant": dynamic_mxfp4_quant},
    "aiter.utility": {"dtypes": dtypes},
    "aiter.utility.fp4_utils": {
        "dynamic_mxfp4_quant": dynamic_mxfp4_quant_typed,
        "e8m0_shuffle": e8m0_shuffle,
        "e8m0_to_f32": e8m0_to_f32,
        "mxfp4_to_f32": mxfp4_to_f32,
    },
}
