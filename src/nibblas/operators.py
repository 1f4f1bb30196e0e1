"""The operators of torch.ops.nibblas: allocate, choose, launch.

Each has a fake implementation, so that torch.compile traces through it without a break. An operand crosses the border
of an operator as its tensors and a `spec` string, which says what they mean. Operands arrive checked (ops.py) and as
matrices ([L,] rows, K), none of them rotated.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nibblas.dispatch import choose
from nibblas.formats import Format, as_format
from nibblas.kernel import Kernel
from nibblas.kernels import cpu_library, cpu_quantize, triton_launch, triton_quantize
from nibblas.layouts import Layout, as_layout
from nibblas.problem import DTYPE_NAMES, Problem, arch_of, operand_layouts, operand_name
from nibblas.quantize import dequantize
from nibblas.tensor import ScaledTensor

Operand = Tensor | ScaledTensor

OPERAND = "Tensor {0}, Tensor? {0}_scale, Tensor? {0}_global_scale, str {0}_spec"


def as_arguments(t: Operand) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """An operand as the operators take it: data, scale, global_scale, spec. Its rotation is lost."""
    if isinstance(t, Tensor):
        return t, None, None, ""
    matrix = "" if t.matrix is None else f"{t.matrix[0]},{t.matrix[1]}"
    return t.data, t.scale, t.global_scale, f"{t.format.name}|{t.layout.name}|{t.data_layout.name}|{matrix}"


@lru_cache(maxsize=1024)
def _parse(spec: str) -> tuple[Format, Layout, Layout, tuple[int, int] | None]:
    format, layout, data_layout, matrix = spec.split("|")
    N_K = tuple(int(n) for n in matrix.split(",")) if matrix else None
    return as_format(format), as_layout(layout), as_layout(data_layout), N_K  # type: ignore[return-value]


def _operand(data: Tensor, scale: Tensor | None, global_scale: Tensor | None, spec: str) -> Operand:
    if not spec:
        return data
    format, layout, data_layout, matrix = _parse(spec)
    # What crosses the border was checked before: the constructor's checks would cost more than a small product.
    t = object.__new__(ScaledTensor)
    t.__dict__.update(data=data, scale=scale, format=format, global_scale=global_scale, layout=layout)
    t.__dict__.update(data_layout=data_layout, scale_rule=None, rotation=0, matrix=matrix)
    return t


def _rows(t: Operand) -> int:
    if isinstance(t, Tensor):
        return t.shape[-2]
    return t.data.shape[-2] if t.matrix is None else t.matrix[0]


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager:
    """A context in which this device is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def linear_problem(
    a: Operand, b: ScaledTensor, bias: Tensor | None, dtype: torch.dtype, batch_invariant: bool = False
) -> Problem:
    """The Problem that a product of these operands poses: a ([L,] M, K), b ([L,] N, K)."""
    return product_problem(
        "linear", a, b, bias, dtype, L=b.data.shape[0] if b.ndim == 3 else 1, batch_invariant=batch_invariant
    )


def product_problem(
    op: str,
    a: Operand,
    b: ScaledTensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    L: int = 1,
    G: int = 1,
    batch_invariant=False,
) -> Problem:
    """The Problem of an op over a (..., M, K) and b (..., N, K)."""
    *_, N, K = b.shape
    return _problem(
        op,
        a.shape[-2],
        N,
        K,
        L,
        G,
        operand_name(a, op),
        b.format.name,
        DTYPE_NAMES[dtype],
        operand_layouts(a),
        operand_layouts(b),
        bias is not None,
        batch_invariant,
        b.device,
    )


@lru_cache(maxsize=4096)
def _problem(op, M, N, K, L, G, a, b, out, a_layouts, b_layouts, bias, batch_invariant, device) -> Problem:
    """Problems are asked at every call, and are made once."""
    arch = arch_of(device)
    return Problem(op, M, N, K, L, G, a, b, out, a_layouts, b_layouts, bias, "", batch_invariant, arch)


def launch_linear(
    a: Operand, b: ScaledTensor, bias: Tensor | None, out: Tensor, name: str | None, batch_invariant: bool
) -> None:
    if not out.numel():
        return
    if not a.shape[-1]:
        out.zero_() if bias is None else out.copy_(bias)
        return
    kernel = choose(linear_problem(a, b, bias, out.dtype, batch_invariant), b.device, name)
    with on_device(b.device):
        launch_each(kernel, a, b, _side_by_side(bias), out)


def _side_by_side(t: Tensor | None) -> Tensor | None:
    """A bias as kernels read it."""
    return t if t is None or t.is_contiguous() else t.contiguous()


def launch_each(kernel: Kernel, a: Operand, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """The launch of a linear kernel, or one for each of a batch that it doesn't take."""
    if b.ndim == 2 or kernel.batched:
        kernel.launch(a, b, bias, out)
    else:
        for l in range(b.shape[0]):
            kernel.launch(a[l], b[l], bias, out[l])


def bind_linear(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> Callable[[Tensor, Tensor], None]:
    """launch_linear(a, b, bias, out) as run(a, out), for more a and out that are like these in all but their place.

    That is: contiguous, of as many elements, of these dtypes and this device, with b and bias the very same memory.
    What is returned belongs to the thread that asked.
    """
    kernel, index = choose(linear_problem(a, b, bias, out.dtype), b.device), b.device.index
    a_shape, out_shape = a.shape, out.shape
    if kernel.bind is not None and (bias is None or bias.is_contiguous()):  # a copy would not see what is written to it
        launch = kernel.bind(a, b, bias, out)
    else:

        def launch(a: Tensor, out: Tensor) -> None:
            if a.ndim != 2:
                a, out = a.view(a_shape), out.view(out_shape)
            kernel.launch(a, b, _side_by_side(bias), out)

    if b.device.type != "cuda":
        return launch

    def run(a: Tensor, out: Tensor) -> None:
        if torch.cuda.current_device() == index:
            launch(a, out)
        else:
            with torch.cuda.device(index):
                launch(a, out)

    return run


def best_linear(a: Operand, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """What kernels that are made of products make them with."""
    launch_linear(a, b, bias, out, None, False)


def launch_grouped(
    x: Operand, w: ScaledTensor, offsets: Tensor, bias: Tensor | None, out: Tensor, name: str | None
) -> None:
    if offsets.device.type == "cpu":
        bounds = offsets.tolist()
        if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > x.shape[0]:
            raise ValueError(
                f"grouped_linear: offsets {bounds[:8]}{'...' if len(bounds) > 8 else ''} must ascend within "
                f"0..{x.shape[0]}, the rows of x"
            )
    if not out.numel():
        return
    if not w.data.shape[0]:
        out.zero_()
        return
    problem = product_problem("grouped_linear", x, w, bias, out.dtype, G=w.data.shape[0])
    with on_device(w.device):
        kernel = choose(problem, w.device, name)
        kernel.launch(x, w, offsets.contiguous(), _side_by_side(bias), out, linear=best_linear)


def launch_gated(
    x: Operand,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    out: Tensor,
    name: str | None,
) -> None:
    if not out.numel():
        return
    problem = product_problem("gated_linear", x, w_up, bias_gate, out.dtype)
    w_gate = w_gate.with_layout(w_up.layout, w_up.data_layout)
    with on_device(w_up.device):
        kernel = choose(problem, w_up.device, name)
        biases = _side_by_side(bias_gate), _side_by_side(bias_up)
        kernel.launch(x, w_gate, w_up, *biases, activation, out, linear=best_linear)


_LIBRARY = torch.library.Library("nibblas", "DEF")


def _outside_autocast(implementation: Callable) -> Callable:
    """Autocast would narrow the products of torch that an implementation is made of."""

    def run(*arguments):
        active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        if not active:
            return implementation(*arguments)
        with ExitStack() as stack:
            for device in active:
                stack.enter_context(torch.autocast(device, enabled=False))
            return implementation(*arguments)

    return run


def _define(name: str, arguments: str, returns: str, implementation: Callable, fake: Callable) -> None:
    _LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _outside_autocast(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibblas::{name}", fake, lib=_LIBRARY)


def _define_product(name: str, operands: tuple[str, ...], others: str, launch: Callable, shape: Callable) -> None:
    """Two operators: `name(..., out_dtype)` returns the product, `name_out(..., out)` writes it to out.

    Their arguments are those of the operands, then others. launch(*operands, *others, out) computes, shape(*operands)
    is the product's.
    """
    parts = [slice(4 * i, 4 * i + 4) for i in range(len(operands))]
    rest = 4 * len(operands)
    arguments = ", ".join([*(OPERAND.format(operand) for operand in operands), others])

    def matrices(given: tuple) -> list[Operand]:
        return [_operand(*given[part]) for part in parts]

    def fake(*given):
        return given[0].new_empty(shape(*matrices(given)), dtype=given[-1])

    def compute(*given):
        found = matrices(given)
        out = given[0].new_empty(shape(*found), dtype=given[-1])
        launch(*found, *given[rest:-1], out)
        return out

    def write(*given):
        launch(*matrices(given), *given[rest:])

    _define(name, f"{arguments}, ScalarType out_dtype", "Tensor", compute, fake)
    _define(f"{name}_out", f"{arguments}, Tensor(a!) out", "()", write, lambda *_: None)


_define_product(
    "linear",
    ("a", "b"),
    "Tensor? bias, str? kernel, bool batch_invariant",
    lambda a, b, bias, kernel, batch_invariant, out: launch_linear(a, b, bias, out, kernel, batch_invariant),
    lambda a, b: (*b.data.shape[:-2], _rows(a), _rows(b)),
)
_define_product(
    "grouped_linear",
    ("x", "w"),
    "Tensor offsets, Tensor? bias, str? kernel",
    lambda x, w, offsets, bias, kernel, out: launch_grouped(x, w, offsets, bias, out, kernel),
    lambda x, w: (_rows(x), _rows(w)),
)
_define_product(
    "gated_linear",
    ("x", "w_gate", "w_up"),
    "Tensor? bias_gate, Tensor? bias_up, str activation, str? kernel",
    lambda x, gate, up, bias_gate, bias_up, activation, kernel, out: launch_gated(
        x, gate, up, bias_gate, bias_up, activation, out, kernel
    ),
    lambda x, gate, up: (_rows(x), _rows(up)),
)


def _quantize(x, global_scale, format, scale_rule, kernel):
    target = as_format(format)
    problem = Problem(
        op="quantize",
        M=x.shape[0],
        N=0,
        K=x.shape[1],
        a=operand_name(x, "quantize"),
        b=format,
        out=format,
        rule=scale_rule,
        arch=arch_of(x.device),
    )
    with on_device(x.device):
        w = choose(problem, x.device, kernel).launch(x, target, scale_rule, global_scale)
    # An operator's results have one type, and may not be its inputs: an absent global scale travels as no element.
    if w.global_scale is None:
        return w.data, w.scale, x.new_empty(0, dtype=torch.float32)
    return w.data, w.scale, w.global_scale if global_scale is None else w.global_scale.clone()


def _quantize_fake(x, global_scale, format, scale_rule, kernel):
    rows, K = x.shape
    blocks = K // as_format(format).block_size
    bytes_ = x.new_empty((rows, K // 2), dtype=torch.uint8), x.new_empty((rows, blocks), dtype=torch.uint8)
    return (*bytes_, x.new_empty(() if as_format(format).has_global_scale else 0, dtype=torch.float32))


_define(
    "quantize",
    "Tensor x, Tensor? global_scale, str format, str scale_rule, str? kernel",
    "(Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)


@cache
def _decoder(device: torch.device) -> Callable[[ScaledTensor, torch.dtype], Tensor] | None:
    """The kernel that decodes on a device, of which there is one at most."""
    if device.type == "cpu":
        return cpu_quantize.dequantize if cpu_library.library() is not None else None
    runs = arch_of(device) in triton_launch.ARCHS and find_spec("triton") is not None
    return triton_quantize.dequantize if runs else None


def launch_dequantize(w: ScaledTensor, dtype: torch.dtype) -> Tensor:
    """quantize.dequantize of what is not rotated, value for value, by a kernel where the device has one."""
    decode = _decoder(w.device) if dtype in DTYPE_NAMES and w.data.numel() else None
    if decode is None:
        return dequantize(w, dtype)
    with on_device(w.device):
        if w.device.type != "cpu":
            return decode(w, dtype)
        if w.global_scale is None or not w.global_scale.ndim:
            return decode(w.flatten_rows(), dtype).view(w.shape)
        out = torch.empty(w.shape, dtype=dtype)
        for i in range(len(out)):
            out[i] = launch_dequantize(w[i], dtype)
        return out


def _dequantize(w, w_scale, w_global, w_spec, dtype):
    return launch_dequantize(_operand(w, w_scale, w_global, w_spec), dtype)  # type: ignore[arg-type]


def _fake_dequantize(w, w_scale, w_global, w_spec, dtype):
    return w.new_empty(_operand(w, w_scale, w_global, w_spec).shape, dtype=dtype)


_define("dequantize", f"{OPERAND.format('w')}, ScalarType dtype", "Tensor", _dequantize, _fake_dequantize)


def has_tangent(*operands: Operand | None) -> bool:
    """Whether one may have a tangent of forward mode (torch.func.jvp), which an operator of a library drops."""
    if forward_ad._current_level < 0:
        return False
    return torch.compiler.is_compiling() or any(
        torch._C._functorch.is_functorch_wrapped_tensor(t) or forward_ad.unpack_dual(t).tangent is not None
        for t in operands
        if isinstance(t, Tensor)
    )


def refuse_tangent(op: str, *operands: Operand | None) -> None:
    if has_tangent(*operands):
        raise NotImplementedError(f"{op}: has no derivative in forward mode (inference only)")


@_outside_autocast
def _decoded_linear(a, a_scale, a_global, a_spec, b, b_scale, b_global, b_spec, bias, kernel, batch_invariant, dtype):
    if a_spec:
        a = torch.ops.nibblas.dequantize(a, a_scale, a_global, a_spec, torch.float32)
    y = a.float() @ torch.ops.nibblas.dequantize(b, b_scale, b_global, b_spec, torch.float32).mT
    return (y if bias is None else y + bias.float()).to(dtype)


def linear(*arguments) -> Tensor:
    """torch.ops.nibblas.linear, or where it would drop a tangent torch's own product of what is decoded to fp32."""
    a, bias = arguments[0], arguments[8]
    return (_decoded_linear if has_tangent(a, bias) else torch.ops.nibblas.linear)(*arguments)


def _linear_backward(grad, b, b_scale, b_global, b_spec, dtype):
    """d/dx of x @ w.T: grad @ w, with w decoded to fp32."""
    weights = torch.ops.nibblas.dequantize(b, b_scale, b_global, b_spec, torch.float32)
    return (grad.float() @ weights).to(dtype)


def _fake_linear_backward(grad, b, b_scale, b_global, b_spec, dtype):
    weights = _operand(b, b_scale, b_global, b_spec)
    return grad.new_empty((*grad.shape[:-1], weights.shape[-1]), dtype=dtype)


_define(
    "linear_backward",
    f"Tensor grad, {OPERAND.format('b')}, ScalarType dtype",
    "Tensor",
    _linear_backward,
    _fake_linear_backward,
)


def _keep_weights(ctx, inputs, output):
    (a, _, _, a_spec, b, b_scale, b_global, ctx.b_spec, bias, *_) = inputs
    ctx.a_dtype, ctx.bias_dtype = None if a_spec else a.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(b, b_scale, b_global)


def _linear_gradients(ctx, grad):
    """d/dbias of x @ w.T + bias sums over rows."""
    grad_a = grad_bias = None
    if ctx.a_dtype is not None and ctx.needs_input_grad[0]:
        backward = _outside_autocast(_linear_backward) if has_tangent(grad) else torch.ops.nibblas.linear_backward
        grad_a = backward(grad, *ctx.saved_tensors, ctx.b_spec, ctx.a_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[8]:
        grad_bias = grad.float().sum(dim=tuple(range(grad.ndim - 1))).to(ctx.bias_dtype)
    return grad_a, *[None] * 7, grad_bias, *[None] * 3


torch.library.register_autograd("nibblas::linear", _linear_gradients, setup_context=_keep_weights, lib=_LIBRARY)


def _keep_gradient(ctx, inputs, output):
    (grad, b, b_scale, b_global, ctx.b_spec, _) = inputs
    ctx.dtype = grad.dtype
    ctx.save_for_backward(b, b_scale, b_global)


def _linear_backward_gradient(ctx, grad):
    """d/dgrad of grad @ w: the product with w.T again."""
    weights = (*ctx.saved_tensors, ctx.b_spec)
    return linear(grad, None, None, "", *weights, None, None, False, ctx.dtype), *[None] * 5


torch.library.register_autograd(
    "nibblas::linear_backward", _linear_backward_gradient, setup_context=_keep_gradient, lib=_LIBRARY
)


def _refuse_gradient(op: str):
    def backward(ctx, *grads):
        raise NotImplementedError(f"{op}: has no gradient (inference only); call it under torch.no_grad()")

    torch.library.register_autograd(f"nibblas::{op}", backward, lib=_LIBRARY)


for _op in ("grouped_linear", "gated_linear"):
    _refuse_gradient(_op)
