"""FP4Experts: a mixture of experts with FP4 weights."""

from contextlib import nullcontext
from typing import Self

import torch
from torch import Tensor, nn

from nibblas import ops
from nibblas.formats import NVFP4, Format
from nibblas.kernels.composite import ACTIVATIONS
from nibblas.nn.packed import PackedModule
from nibblas.ops import check_tensor
from nibblas.tensor import stack


class FP4Experts(PackedModule):
    """A mixture of experts with FP4 weights: `nibblas.moe` as a module, for inference.

    Made zero, to load a state_dict into; `from_dense` quantizes dense weights, each expert by its own global_scale.

    Parameters
    ----------
    num_experts, intermediate, hidden : E, I and H; H and I are multiples of the format's block_size.
    format, scale_rule, rotation, device, dtype : as in FP4Linear.
    bias : whether there are bias_gate (E, I), bias_up (E, I) and bias_down (E, H), Parameters.
    activation : "silu" or "swiglu_clamped", as in `nibblas.gated_linear`.

    The packed tensors are w_gate and w_up (E, I, H) and w_down (E, H, I).
    """

    bias_gate: nn.Parameter | None
    bias_up: nn.Parameter | None
    bias_down: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        intermediate: int,
        hidden: int,
        format: Format | str = NVFP4,
        *,
        bias: bool = False,
        activation: str = "silu",
        scale_rule: str | None = None,
        rotation: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(format, scale_rule, rotation, dtype)
        if activation not in ACTIVATIONS:
            raise ValueError(f"FP4Experts: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")
        self.num_experts, self.intermediate, self.hidden = num_experts, intermediate, hidden
        self.activation = activation
        for name, N in (("bias_gate", intermediate), ("bias_up", intermediate), ("bias_down", hidden)):
            zeros = nn.Parameter(torch.zeros(num_experts, N, device=device, dtype=self.dtype)) if bias else None
            self.register_parameter(name, zeros)
        self._declare("w_gate", (num_experts, intermediate, hidden), device)
        self._declare("w_up", (num_experts, intermediate, hidden), device)
        self._declare("w_down", (num_experts, hidden, intermediate), device)

    @classmethod
    def from_dense(
        cls,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        bias_gate: Tensor | None = None,
        bias_up: Tensor | None = None,
        bias_down: Tensor | None = None,
        *,
        format: Format | str = NVFP4,
        scale_rule: str | None = None,
        rotation: int = 0,
        activation: str = "silu",
    ) -> Self:
        """The experts of dense w_gate, w_up (E, I, H), w_down (E, H, I) and biases (E, I), (E, I), (E, H) or none."""
        for name, dense in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
            check_tensor("FP4Experts", name, dense)
        if w_gate.ndim != 3 or w_up.shape != w_gate.shape or w_down.shape != w_gate.mT.shape:
            raise ValueError(
                f"FP4Experts: w_gate is {tuple(w_gate.shape)}, w_up {tuple(w_up.shape)}, w_down {tuple(w_down.shape)}; "
                "need (E, I, H), (E, I, H), (E, H, I)"
            )
        if not len(w_gate):
            raise ValueError("FP4Experts: w_gate holds no expert, need at least one")
        biases = {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": bias_down}
        for name, bias in biases.items():
            if bias is not None:
                check_tensor("FP4Experts", name, bias)
        if len({bias is None for bias in biases.values()}) > 1:
            raise ValueError("FP4Experts: some of bias_gate, bias_up, bias_down are given, need all or none")
        E, I, H = w_gate.shape
        experts = cls(
            E,
            I,
            H,
            format,
            bias=bias_gate is not None,
            activation=activation,
            scale_rule=scale_rule,
            rotation=rotation,
            device="meta",
            dtype=w_gate.dtype,
        )
        for name, bias in biases.items():
            if bias is not None:
                need = (E, H) if name == "bias_down" else (E, I)
                if tuple(bias.shape) != need:
                    raise ValueError(f"FP4Experts: {name} has shape {tuple(bias.shape)}, need {need}")
                setattr(experts, name, nn.Parameter(_of_its_own(bias), requires_grad=bias.requires_grad))
        for name, dense in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
            parts = [ops.quantize(m, format, scale_rule=scale_rule, rotation=rotation) for m in dense.detach()]
            experts.scale_rule = parts[0].scale_rule
            experts._store(name, stack(parts))
        return experts

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x (T, H); expert_ids (T, top_k), -1 for none; expert_weights (T, top_k) -> (T, H) of x's dtype.

        Under autocast too: of transformers' experts, the sum over a token's experts also has x's dtype.
        """
        check_tensor("FP4Experts", "x", x)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return ops.moe(
                x,
                expert_ids,
                expert_weights,
                self._scaled("w_gate"),
                self._scaled("w_up"),
                self._scaled("w_down"),
                self.bias_gate,
                self.bias_up,
                self.bias_down,
                activation=self.activation,
            )

    def extra_repr(self) -> str:
        parts = [f"num_experts={self.num_experts}, intermediate={self.intermediate}, hidden={self.hidden}"]
        parts += [f"bias={self.bias_gate is not None}, {self.format}, activation={self.activation!r}"]
        parts += [f"scale_rule={self.scale_rule!r}"] if self.scale_rule else []
        parts += [f"rotation={self.rotation}"] if self.rotation else []
        return ", ".join(parts)


def _of_its_own(t: Tensor) -> Tensor:
    """The very memory of t if that is all of its storage, else a copy: safetensors takes no parts of others."""
    t = t.detach()
    whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes
    return t if whole else t.clone(memory_format=torch.contiguous_format)


class TransformersExperts(FP4Experts):
    """FP4Experts with the forward of transformers' fused expert modules: hidden states, expert ids, their weights.

    Arguments have the names they had in the module that was replaced; an id of num_experts means none.
    """

    routing_names: tuple[str, ...] = ("top_k_index", "top_k_weights")

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *routing: Tensor, **named: Tensor
    ) -> Tensor:
        expert_ids, expert_weights = *routing, *(named[name] for name in self.routing_names[len(routing) :])
        return super().forward(
            hidden_states, expert_ids.masked_fill(expert_ids >= self.num_experts, -1), expert_weights
        )
