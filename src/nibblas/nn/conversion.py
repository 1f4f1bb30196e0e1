"""`convert`: the linear layers and fused experts of a model become FP4 ones, and a report of what became of each."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nibblas import ops
from nibblas.formats import NVFP4, Format
from nibblas.kernels.composite import ACTIVATIONS
from nibblas.nn.experts import FP4Experts, TransformersExperts
from nibblas.nn.linear import FP4Linear
from nibblas.nn.packed import check_options
from nibblas.problem import DTYPE_NAMES
from nibblas.tensor import ScaledTensor
from nibblas.words import counted

# Names of layers that `convert` and `nibblas quantize` leave as they are unless told otherwise: small, or such that
# their errors reach everything behind them. Patterns as of `matches`: whole models stand below names like
# "roberta_prelayernorm" and "embed_tokens_extend", so that embeddings and norms are known by the last piece.
DEFAULT_EXCLUDE = (
    *(".*embed*", ".*Embed*", ".*emb", "*wte*", "*wpe*", "transformer.w", ".shared", ".*attention_bias"),
    *("*embed_tokens.[0-9]*", "*embeddings.[0-9]*", "*embeds_layers.[0-9]*"),  # embeddings in a list
    *(".*norm*", ".*Norm*"),
    # of diffusion models, seen by all their blocks
    *("*time_embed*", "*time_text_embed*", "*timestep_embed*", "*time_in.*", "*vector_in.*", "*guidance_in.*"),
    *("t_embedder.*", "*.t_embedder.*", "y_embedder.*", "*.y_embedder.*", "text_embedder.*", "*.text_embedder.*"),
    *("*add_embedding.*", "*label_emb.*"),
    # heads and poolers; ".output" would be the output of attention and MLP in RWKV, LED, ProphetNet and others
    *("*lm_head*", ".head", "output", "*model.output", ".output_layer", "*final_layer.linear"),
    *("score", "score.*", "*classifier*", "*classification_head*", "v_head*", "*qa_outputs*"),
    *("cls.*", "*.cls.*", "*pooler*", "*generator_predictions.*", "*discriminator_predictions.*"),
    *(".decoder", "pred_layer.proj", ".vocab_transform", ".vocab_projector", ".output_projection", "proj_out"),
    *(".lm_loss", ".ctc_head", ".codec_head"),
    *(".gate", "*.gate.wg", "*shared_expert_gate*", "*router*"),  # what routes tokens to experts
)
# Modules that read the weights of the Linears inside them, which a Linear with other weights would break.
READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class LayerReport:
    """What `convert` did with one layer: an nn.Linear, or a module of fused experts."""

    name: str
    converted: bool
    reason: str  # why it was left as it was; of a converted layer, what is worth knowing
    shape: tuple[int, ...]  # of the weight, (N, K); of experts (E, 2 * I, H)
    elements: int  # of all its weights
    nbytes: int  # of them in FP4; of a layer that was left, or shares another's weight, 0
    squared_error: float  # sum of (quantized - weight)^2
    squared_sum: float  # sum of weight^2

    @property
    def relative_mse(self) -> float:
        """squared_error / squared_sum; 0 where the weights are all zero."""
        return self.squared_error / self.squared_sum if self.squared_sum else 0.0


def conversion_report(model: nn.Module) -> tuple[LayerReport, ...]:
    """What `convert` did with each layer of the model, in the model's order; ValueError if it was never converted."""
    try:
        return tuple(model._nibblas_conversion.values())  # type: ignore[union-attr, operator]
    except AttributeError:
        raise ValueError(
            f"conversion_report: this {type(model).__name__} did not come from nibblas.nn.convert"
        ) from None


def convert(
    model: nn.Module,
    format: Format | str = NVFP4,
    scale_rule: str | None = None,
    *,
    include: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str | None = None,
    activations: str = "none",
    rotation: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by FP4 ones, in place, and return the model.

    nn.Linear becomes FP4Linear. Fused experts of transformers 5 become FP4Experts with their forward, weights only.
    Linears that share a weight go on sharing it. A layer that can't be converted stays as it is; `conversion_report`
    of the model says what was done with each layer, why, and what error it has.

    Parameters
    ----------
    model : any module; if it is an nn.Linear itself, the FP4Linear is returned.
    format, scale_rule, rotation, activations : as in FP4Linear.
    include : fnmatch patterns of qualified names ("model.layers.*.mlp.*"); None is all. A pattern that starts with a
        dot is of the last piece of the name alone: ".q_proj", ".*_proj".
    exclude : patterns of what to leave; wins over include. None is DEFAULT_EXCLUDE: embeddings, norms, output heads,
        poolers, routers and gates. `exclude=(*DEFAULT_EXCLUDE, "...")` leaves more.
    progress : called with (layers done, layers in all, name of the next) before each layer.

    Raises ValueError for options that don't fit and for an include pattern that matches no layer. Weights are all
    quantized before any layer is replaced, so that an error leaves the model as it was.

    >>> model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), NVFP4, exclude="2")
    >>> [(layer.name, layer.converted, layer.reason) for layer in conversion_report(model)]
    [('0', True, ''), ('2', False, "excluded by '2'")]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model is a {type(model).__name__}, need an nn.Module")
    format = ops.format_for("convert", format)
    check_options("convert", format, scale_rule, rotation, activations)
    include = as_patterns("convert", "include", include, ("*",))
    exclude = as_patterns("convert", "exclude", exclude, DEFAULT_EXCLUDE)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) or _holds_fused_experts(m)}
    for pattern in include:
        if pattern != "*" and not any(matches(name, pattern) for name in layers):
            raise ValueError(f"convert: include pattern {pattern!r} matches none of {counted(len(layers), 'layer')}")

    reasons = {
        name: _excluded(name, include, exclude) or _why_not(model, name, layer, format, rotation)
        for name, layer in layers.items()
    }
    reasons |= _broken_ties(model, layers, reasons)
    wanted = [name for name in layers if not reasons[name]]
    made: dict[str, nn.Module] = {}
    reports: dict[str, LayerReport] = {}
    owners: dict[int, str] = {}  # name of the layer that was quantized for a weight
    for name, layer in layers.items():
        if reasons[name]:
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.gate_up_proj
            shape = () if is_lazy(weight) else tuple(weight.shape)
            elements = sum(p.numel() for p in layer.parameters() if not is_lazy(p) and p.ndim >= 2)
            reports[name] = LayerReport(name, False, reasons[name], shape, elements, 0, 0.0, 0.0)
            continue
        if progress is not None:
            progress(len(made), len(wanted), name)
        if isinstance(layer, nn.Linear):
            owner = owners.setdefault(id(layer.weight), name)
            if owner == name:
                made[name], reports[name] = _linear(name, layer, format, scale_rule, rotation, activations)
            else:
                first = made[owner]
                assert isinstance(first, FP4Linear)
                tied = FP4Linear._of(first.weight_scaled, layer, activations)
                tied._tie(first)
                made[name] = tied
                reports[name] = replace(reports[owner], name=name, reason=f"shares the weight of {owner}", nbytes=0)
        else:
            made[name], reports[name] = _experts(name, layer, format, scale_rule, rotation, activations)

    replacements = {id(layers[name]): new for name, new in made.items()}
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            if id(module) in replacements:
                parent._modules[child] = replacements[id(module)]
    model = replacements.get(id(model), model)
    model._nibblas_conversion = {**getattr(model, "_nibblas_conversion", {}), **reports}  # type: ignore[assignment]
    return model


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of a layer's name or, if it starts with a dot, of the last piece of the name.

    >>> [matches("input_norm.linear", pattern) for pattern in ("*norm*", ".*norm*", ".linear", "linear")]
    [True, False, True, False]
    """
    return fnmatchcase(f".{name.rpartition('.')[2]}" if pattern.startswith(".") else name, pattern)


def as_patterns(op: str, argument: str, given: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    """What was given for include or exclude: None (the default), one pattern, or some."""
    if given is None:
        return default
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"{op}: {argument} has a {type(pattern).__name__}, need str patterns, one or some, or None")
    return found


def _excluded(name: str, include: Iterable[str], exclude: Iterable[str]) -> str:
    for pattern in exclude:
        if matches(name, pattern):
            return f"excluded by {pattern!r}"
    return "" if any(matches(name, pattern) for pattern in include) else "not in include"


def _why_not(model: nn.Module, name: str, layer: nn.Module, format: Format, rotation: int) -> str:
    """Why a layer can't be converted, "" if it can."""
    parameters = list(layer.parameters(recurse=False))
    if any(map(is_lazy, parameters)):
        return "is lazy, and has no weights before its first call"
    weights = [parameter for parameter in parameters if parameter.ndim >= 2]
    if any(weight.is_meta for weight in weights):
        return "its weights are on the meta device, not loaded"
    if any(weight.dtype not in DTYPE_NAMES for weight in weights):
        return f"its weights are {weights[0].dtype}, need one of {', '.join(map(str, DTYPE_NAMES))}"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks) or "forward" in vars(layer):
        return "has hooks, which a replacement would lose"
    if isinstance(layer, nn.Linear):
        if type(layer) is not nn.Linear:
            return f"is a {type(layer).__name__}, which may do more than an nn.Linear"
        parent = model.get_submodule(name.rpartition(".")[0]) if name else layer
        if isinstance(parent, READS_WEIGHTS):
            return f"is inside {type(parent).__name__}, which reads its weight"
        contractions = [layer.in_features]
    else:
        reason = _why_not_fused(layer)
        if reason:
            return reason
        contractions = list(_fused_shape(layer)[1:])
    for K in contractions:
        if K % format.block_size:
            return f"K = {K} is not a multiple of {format}'s block_size {format.block_size}"
        if rotation and K % rotation:
            return f"K = {K} is not a multiple of rotation {rotation}"
    return ""


def _broken_ties(model: nn.Module, layers: dict[str, nn.Module], reasons: dict[str, str]) -> dict[str, str]:
    """Reasons to leave layers that share a weight with something that stays as it is."""
    users = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append(name)
    found = {}
    for name, layer in layers.items():
        if reasons[name]:
            continue
        for parameter in layer.parameters(recurse=False):
            staying = [user for user in users[id(parameter)] if reasons.get(user, "stays")]
            if parameter.ndim >= 2 and staying:
                found[name] = f"shares its weight with {staying[0]}, which is not converted"
    return found


def _squared(dense: Tensor, w: ScaledTensor) -> tuple[float, float]:
    """Sums of (dequantized - dense)^2 and of dense^2."""
    dense = dense.float()
    error = (ops.dequantize(w) - dense).square_().sum(dtype=torch.float64)
    return error.item(), dense.square().sum(dtype=torch.float64).item()


@torch.no_grad()
def _linear(
    name: str, linear: nn.Linear, format: Format, scale_rule: str | None, rotation: int, activations: str
) -> tuple[FP4Linear, LayerReport]:
    weight = linear.weight.detach()
    w = ops.quantize(weight, format, scale_rule=scale_rule, rotation=rotation)
    report = LayerReport(name, True, "", tuple(weight.shape), weight.numel(), w.nbytes, *_squared(weight, w))
    return FP4Linear._of(w, linear, activations), report


def _holds_fused_experts(module: nn.Module) -> bool:
    gate_up = module._parameters.get("gate_up_proj")
    return gate_up is not None and gate_up.ndim == 3 and module._parameters.get("down_proj") is not None


def _fused_shape(module: Any) -> tuple[int, int, int]:
    """E, I, H of fused experts."""
    E, H, I = module.down_proj.mT.shape if module.is_transposed else module.down_proj.shape
    return E, I, H


def _why_not_fused(module: Any) -> str:
    """Why a module with gate_up_proj and down_proj is not one that FP4Experts can stand for, "" if it is.

    transformers 5 marks its fused experts with what their weights look like; the gate is known by what it computes.
    """
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    if not all(hasattr(module, mark) for mark in marks):
        return "fused experts without the marks of transformers 5"
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return "fused experts with another structure than down(act(gate) * up)"
    if getattr(module, "_is_expert_parallel", False):
        return "fused experts that are spread over devices"
    biases = {"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set()
    names = {name for name, _ in module.named_parameters()}
    if names != {"gate_up_proj", "down_proj"} | biases:
        return f"fused experts with the parameters {', '.join(sorted(names))}"
    if _activation_of(module) is None:
        return f"fused experts whose gate is none of {', '.join(ACTIVATIONS)}"
    return ""


@torch.no_grad()
def _activation_of(module: Any) -> str | None:
    """The name of the activation that a module's gate computes on a probe, None if it is none of ours."""
    _, I, _ = _fused_shape(module)
    probe = torch.linspace(-20, 20, 16 * I, device=module.down_proj.device)
    gate, up = probe.view(16, I), probe.flip(0).roll(7).view(16, I)
    joined = torch.cat((gate, up), -1) if module.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
    try:
        computed = module._apply_gate(joined)
    except (RuntimeError, TypeError, ValueError):
        return None
    for name, activation in ACTIVATIONS.items():
        if computed.shape == gate.shape and torch.allclose(computed, activation(gate, up), rtol=1e-4, atol=1e-4):
            return name
    return None


def _split(module: Any, joined: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of a dimension that holds both: (E, 2 * I, ...) -> two of (E, I, ...)."""
    if module.is_concatenated:
        gate, up = joined.chunk(2, 1)
        return gate, up
    return joined[:, ::2], joined[:, 1::2]


@torch.no_grad()
def _experts(
    name: str, module: Any, format: Format, scale_rule: str | None, rotation: int, activations: str
) -> tuple[FP4Experts, LayerReport]:
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    dense = (*_split(module, gate_up), down)
    biases = (*_split(module, module.gate_up_proj_bias.detach()), module.down_proj_bias) if module.has_bias else ()
    activation = _activation_of(module)
    assert activation is not None
    experts = TransformersExperts.from_dense(
        *dense, *biases, format=format, scale_rule=scale_rule, rotation=rotation, activation=activation
    )
    experts.train(module.training)
    experts.routing_names = tuple(inspect.signature(module.forward).parameters)[1:3]
    packed = [experts._scaled(part) for part in ("w_gate", "w_up", "w_down")]
    sums = [_squared(weights, w) for weights, w in zip(dense, packed, strict=True)]
    note = "weights only: experts take activations as they are" if activations == "fp4" else ""
    report = LayerReport(
        name,
        True,
        note,
        tuple(gate_up.shape),
        sum(weights.numel() for weights in dense),
        sum(w.nbytes for w in packed),
        sum(error for error, _ in sums),
        sum(square for _, square in sums),
    )
    return experts, report
