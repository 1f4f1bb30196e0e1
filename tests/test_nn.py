"""FP4Linear, FP4Experts and convert: storage, state_dict, what is replaced and what is left."""

import copy
import json
import pickle
import threading
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from checks import assert_close
from safetensors.torch import load, load_model, save, save_file, save_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nibblas as nb
from nibblas import dispatch, operators, ops, reference
from nibblas.formats import FORMATS
from nibblas.kernels import kernels, torch_linear
from nibblas.layouts import FRAGMENT_SCALES_NVFP4, FRAGMENTS_NVFP4, LINEAR, ROWS_16x1, ROWS_16x4
from nibblas.nn import DEFAULT_EXCLUDE, FP4Experts, FP4Linear, conversion_report, convert
from nibblas.nn import linear as nn_linear
from nibblas.nn.conversion import matches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_COMPILER = "ignore:nibblas. no FP4 kernel"
pytestmark = pytest.mark.filterwarnings(NO_COMPILER)

(TORCH,) = torch_linear.KERNELS
TILED = replace(TORCH, name="tiled_linear", decodes_weights=False, b_layouts=((ROWS_16x1, ROWS_16x4),))
REST = tuple(kernel for kernel in kernels() if kernel.op != "linear")


@pytest.fixture(params=["decoded", "tiled", "chosen"])
def storage(request, monkeypatch):
    """Weights kept decoded; in the layouts of a kernel that takes no other; as this machine's kernels like it."""
    if request.param != "chosen":
        present = (*REST, TORCH if request.param == "decoded" else TILED)
        monkeypatch.setattr(dispatch, "kernels", lambda: present)
    dispatch.forget()
    yield request.param
    dispatch.forget()


def linear(N=24, K=64, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(K, N, bias=bias, dtype=dtype)


def draw(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_parts(a, b):
    parts = [(getattr(w, part) for part in ("linear_data", "linear_scale", "global_scale")) for w in (a, b)]
    return all(x is y or torch.equal(x, y) for x, y in zip(*parts, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rotation", "bias"), [(0, True), (32, False)])
def test_forward_is_the_product_with_the_stored_weight(storage, format, dtype, rotation, bias):
    layer = FP4Linear.from_linear(linear(bias=bias, dtype=dtype), format, rotation=rotation)
    x = draw(5, 64, dtype=dtype)
    w = layer.weight_scaled
    exact = reference.linear(x, w, layer.bias)
    once_more = dtype if layer.decoded is not None and layer.decoded.dtype == torch.bfloat16 else None
    # A rotated x is computed in fp32: an error of a few units of it, relative to x.
    assert_close(
        layer(x).detach(), exact, dtype, K=64 * (8 if rotation else 1), what="FP4Linear", intermediate=once_more
    )
    if layer.decoded is None:
        assert torch.equal(layer(x), nb.linear(x, w, layer.bias))


def test_a_bound_product_is_the_operator(monkeypatch):
    """A call like one before runs what that one bound, unless a gradient is asked or weight or bias are others."""
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, TILED))
    dispatch.forget()
    ran = []

    def counted(*operands):
        run = operators.bind_linear(*operands)
        return lambda x, y: (ran.append(threading.get_ident()), run(x, y))

    monkeypatch.setattr(nn_linear, "bind_linear", counted)
    layer, x = FP4Linear.from_linear(linear()), draw(2, 5, 64)
    w = layer.weight_scaled
    expected = nb.linear(x, w, layer.bias).detach()
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)
    assert not ran  # the bias takes a gradient
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        assert not ran  # the first of its kind
        for dense in (x, x.clone(), draw(10, 64).view(2, 5, 64)):
            y = layer(dense)
            assert torch.equal(y, nb.linear(dense, w, layer.bias))
            assert y.is_contiguous()
        assert len(ran) == 3
        strided = torch.stack((x, x), -1)[..., 0]
        assert torch.equal(layer(strided), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert len(ran) == 3
        in_thread = threading.Thread(target=torch.no_grad()(lambda: (layer(x), layer(x))))
        in_thread.start()
        in_thread.join()
        assert len(ran) == 4
        assert ran[3] != threading.get_ident()

        for part in ("weight", "weight_scale", "weight_global_scale"):
            before = getattr(layer, part)
            setattr(layer, part, before * 0)
            assert torch.equal(layer(x), layer.bias.expand(2, 5, 24))
            setattr(layer, part, before)
        layer.bias.data = layer.bias.data + 1
        assert torch.equal(layer(x), nb.linear(x, w, layer.bias))
        layer.bias = torch.nn.Parameter(torch.zeros(24))
        assert torch.equal(layer(x), nb.linear(x, w, layer.bias))
        assert len(ran) == 4
        for part in (*layer.buffers(), layer.bias):
            layer(x)
            ran.clear()
            part.data = part.data.clone()  # as what moves weights to the host and back does
            assert torch.equal(layer(x), nb.linear(x, w, layer.bias))
            assert not ran
            assert torch.equal(layer(x), nb.linear(x, w, layer.bias))
            assert len(ran) == 1
        twin = copy.deepcopy(layer)
        twin.weight.zero_()
        assert torch.equal(twin(x), layer.bias.expand(2, 5, 24))
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
        ran.clear()
        other = FP4Linear.from_linear(linear(seed=9))
        other.bias = layer.bias
        layer.swap(other.weight_scaled)
        assert torch.equal(layer(x), other(x))
        assert torch.equal(layer(x), other(x))
        assert len(ran) == 2
        dispatch.forget()
        layer(x)
        assert len(ran) == 2
        for rows in range(1, 2 * nn_linear.MOST_BOUND):
            layer(draw(rows, 64))
        assert len(layer._bound) <= nn_linear.MOST_BOUND
    dispatch.forget()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning", NO_COMPILER)
def test_what_looks_on_sees_the_operator(storage):
    layer, x, other = FP4Linear.from_linear(linear(), rotation=16), draw(5, 64), draw(5, 64, seed=7)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        y = layer(other)
        graphs = [make_fx(layer)(x), torch.jit.trace(layer, x, check_trace=False), torch.export.export(layer, (x,))]
        graphs[2] = graphs[2].module()
        for graph in graphs:
            assert torch.equal(graph(other), y)
        batched = torch.func.vmap(layer)(torch.stack((x, other)))
        assert torch.allclose(batched[1], y, rtol=1e-5, atol=1e-6)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(x)).shape == (5, 24)
        if layer.decoded is None:
            for look in (Seen(), Called()):
                seen = []
                with look:
                    layer(x)
                assert any("nibblas" in name and "linear" in name for name in seen)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning", NO_COMPILER)
@pytest.mark.parametrize("options", [{}, {"rotation": 16}, {"activations": "fp4"}], ids=str)
@pytest.mark.parametrize("shape", [(64,), (5, 64)], ids=str)
def test_a_graph_takes_other_batches(storage, shape, options):
    layer, x, other = FP4Linear.from_linear(linear(), **options), draw(3, *shape), draw(7, *shape, seed=7)
    with torch.no_grad():
        graphs = [
            torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("b", max=64)},), strict=strict)
            for strict in (False, True)
        ]
        traced = torch.jit.trace(layer, x, check_trace=False)
        for graph in (*(graph.module() for graph in graphs), traced):
            assert torch.equal(graph(other), layer(other))


@pytest.mark.filterwarnings("ignore:.torch.jit.", NO_COMPILER)  # torch.func.jvp scripts some of its rules
def test_forward_mode_differentiates_a_layer(storage):
    layer, x = FP4Linear.from_linear(linear()), draw(5, 64)
    tangent = nb.linear(x, layer.weight_scaled)
    with torch.no_grad():
        for _ in range(2):  # the second call finds a bound product
            layer(x)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
            torch.testing.assert_close(found, tangent, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], tangent, rtol=1e-4, atol=1e-4)
        layer.activations = "fp4"
        with pytest.raises(NotImplementedError, match='activations="fp4": has no derivative in forward mode'):
            torch.func.jvp(layer, (x,), (x,))


@pytest.mark.parametrize("options", [{}, {"rotation": 16}, {"activations": "fp4"}], ids=str)
def test_shapes_come_of_the_meta_device(options):
    layer = FP4Linear(64, 24, device="meta", **options)
    for _ in range(2):
        with torch.no_grad():
            y = layer(torch.empty(2, 3, 64, device="meta", dtype=torch.bfloat16))
        assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 24), torch.bfloat16)
    ids = torch.empty(5, 2, device="meta", dtype=torch.int64)
    y = FP4Experts(4, 32, 64, device="meta")(torch.empty(5, 64, device="meta"), ids, ids.float())
    assert (y.device.type, y.shape) == ("meta", (5, 64))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 0)], ids=str)
def test_leading_dimensions(storage, leading):
    layer = FP4Linear.from_linear(linear())
    x = draw(*leading, 64)
    assert layer(x).shape == (*leading, 24)
    if x.numel():
        rows = x.reshape(-1, 64)
        assert torch.allclose(layer(x).reshape(-1, 24), layer(rows), rtol=1e-5, atol=1e-6)


def test_other_dtypes_of_x_lose_nothing(storage):
    """A bf16 layer takes fp32 and fp16 activations as they are."""
    layer = FP4Linear.from_linear(linear(dtype=torch.bfloat16))
    for dtype in (torch.float32, torch.float16):
        x = draw(5, 64, dtype=dtype)
        exact = reference.linear(x, layer.weight_scaled, layer.bias)
        assert_close(layer(x).detach(), exact, dtype, K=64, what="FP4Linear")


def test_x_of_any_strides(storage):
    layer, x = FP4Linear.from_linear(linear()), draw(64, 6)
    assert torch.allclose(layer(x.T), layer(x.T.contiguous()), rtol=1e-5, atol=1e-6)
    wide = draw(6, 130)[:, 1:129:2]
    assert torch.allclose(layer(wide), layer(wide.contiguous()), rtol=1e-5, atol=1e-6)


def test_fp4_activations(storage):
    for format, rotation in ((nb.NVFP4, 0), (nb.MXFP4, 32)):
        layer = FP4Linear.from_linear(linear(), format, rotation=rotation, activations="fp4")
        x = draw(2, 3, 64)
        expected = nb.linear(
            nb.quantize(x, format, rotation=rotation), layer.weight_scaled, layer.bias, out_dtype=x.dtype
        )
        assert torch.equal(layer(x), expected)
        assert layer(x).dtype == torch.float32
        assert layer.decoded is None
        layer.activations = "none"
        assert not torch.equal(layer(x), expected)
        assert storage == "chosen" or (layer.decoded is not None) == (storage == "decoded")


def test_gradients_to_x_and_bias(storage):
    layer, x = FP4Linear.from_linear(linear()), draw(2, 5, 64).requires_grad_()
    grad = draw(2, 5, 24)
    layer(x).backward(grad)
    exact = reference.matmul(grad.reshape(10, 24), nb.dequantize(layer.weight_scaled).T)
    assert_close(x.grad.reshape(10, 64), exact, torch.float32, K=24, what="gradient to x")
    assert torch.allclose(layer.bias.grad, grad.sum((0, 1)), rtol=1e-5, atol=1e-6)


def test_quantized_activations_have_no_gradient(storage):
    layer, x = FP4Linear.from_linear(linear(), activations="fp4"), draw(5, 64)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((24,), 5.0))
    y = layer(x.requires_grad_())
    with pytest.raises(NotImplementedError, match='with activations="fp4" x has no gradient'):
        y.sum().backward()


def test_a_layer_of_no_inputs(storage):
    layer = FP4Linear(0, 8)
    layer.bias.data.copy_(torch.arange(8.0))
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(layer(torch.ones(2, 3, 0)), torch.arange(8.0).expand(2, 3, 8))


def test_a_rotated_layer_is_stored_for_what_it_multiplies(monkeypatch):
    """A rotated x is fp32, which a kernel for bf16 doesn't take."""
    narrow = replace(TILED, name="narrow", operands=(("bf16", "nvfp4"),), cost=lambda problem, line: 1e-9)
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, narrow, replace(TORCH, decodes_weights=False)))
    dispatch.forget()
    dense = linear(dtype=torch.bfloat16)
    assert FP4Linear.from_linear(dense).weight_scaled.data_layout == ROWS_16x4
    assert FP4Linear.from_linear(dense, rotation=16).weight_scaled.data_layout == LINEAR
    dispatch.forget()


def test_trains_an_adapter_through_frozen_layers(storage):
    """The gradient of low-rank factors beside and before an FP4 layer is that with its weight dequantized."""
    layers = [FP4Linear.from_linear(linear(N=64, seed=seed), rotation=16).requires_grad_(False) for seed in (0, 1)]
    down, up = draw(4, 64, seed=2).requires_grad_(), draw(64, 4, seed=3).requires_grad_()
    x, grad = draw(5, 64), draw(5, 64, seed=4)

    def gradients(first, second):
        return torch.autograd.grad(second(first(x) + x @ down.T @ up.T), (down, up), grad)

    with torch.no_grad():
        basis = torch.eye(64)
        dense = [(layer(basis) - layer(basis * 0)).T.contiguous() for layer in layers]
    wanted = gradients(
        *(lambda x, w=w, layer=layer: x @ w.T + layer.bias for w, layer in zip(dense, layers, strict=True))
    )
    for got, want in zip(gradients(*layers), wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * want.abs().max())
    checkpointed = [partial(checkpoint, layer, use_reentrant=False) for layer in layers]
    assert all(map(torch.equal, gradients(*checkpointed), gradients(*layers)))


def test_compiles_with_gradients(storage):
    layer, x = FP4Linear.from_linear(linear(), rotation=16), draw(5, 64).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))
    got = torch.autograd.grad(compiled(x).square().sum(), (x, layer.bias))
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_inference_mode(storage):
    layer, x = FP4Linear.from_linear(linear(), rotation=16), draw(5, 64)
    with torch.inference_mode():
        made = FP4Linear.from_linear(linear(), rotation=16)
        y = made(x)
        assert torch.equal(y, layer(x))
    with torch.no_grad():
        assert torch.equal(made(x), y)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_computes_the_same_and_is_its_own(storage, again):
    model = nn.ModuleDict({"a": linear(), "b": linear(seed=1), "experts": experts()})
    model["b"].weight = model["a"].weight
    model = convert(model, rotation=16)
    copied, x, a = again(model), draw(5, 64), model["a"].weight.data_ptr()
    for name in "ab":
        assert torch.equal(copied[name](x), model[name](x))
    assert torch.equal(copied["experts"](x, *routing(5)), model["experts"](x, *routing(5)))
    before = model["b"](x)
    copied["a"].load_state_dict(FP4Linear.from_linear(linear(seed=5)).state_dict())
    assert torch.equal(copied["a"].weight, copied["b"].weight)  # tied to each other, and to nothing else
    assert not torch.equal(copied["b"](x), before)
    assert torch.equal(model["b"](x), before)
    assert model["a"].weight.data_ptr() == a


@pytest.mark.parametrize("options", [{}, {"rotation": 16}, {"activations": "fp4"}], ids=str)
def test_compiles_to_one_graph(storage, options):
    layer = FP4Linear.from_linear(linear(), **options)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for x in (draw(3, 64), draw(2, 5, 64)):
            assert torch.allclose(compiled(x), layer(x), rtol=1e-5, atol=1e-6)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"FP4Linear: K = 40 is not a multiple of nvfp4's block_size 16"):
        FP4Linear(40, 8)
    with pytest.raises(ValueError, match=r"FP4Linear: K = 48 is not a multiple of rotation 32"):
        FP4Linear(48, 8, rotation=32)
    with pytest.raises(ValueError, match=r"FP4Linear: rotation is 8"):
        FP4Linear(64, 8, rotation=8)
    with pytest.raises(ValueError, match=r"FP4Linear: scale_rule 'even' is unknown; nvfp4 has absmax"):
        FP4Linear(64, 8, scale_rule="even")
    with pytest.raises(ValueError, match=r"FP4Linear: activations is 'fp8', need one of none, fp4"):
        FP4Linear(64, 8, activations="fp8")
    with pytest.raises(ValueError, match=r"format 'int4' is unknown"):
        FP4Linear(64, 8, format="int4")
    layer = FP4Linear.from_linear(linear())
    with pytest.raises(ValueError, match=r"FP4Linear: x has shape \(2, 32\), need \(\.\.\., 64\)"):
        layer(draw(2, 32))
    with pytest.raises(TypeError, match=r"FP4Linear: x is torch.uint8, need one of torch.float32"):
        layer(torch.ones(2, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"FP4Linear: x is on meta, the weight on cpu"):
        layer(torch.ones(2, 64, device="meta"))
    with pytest.raises(ValueError, match=r"FP4Linear: x has shape \(\), need \(\.\.\., 64\)"):
        layer(torch.tensor(1.0))
    for x in ([1.0] * 64, nb.quantize(draw(2, 64), nb.NVFP4), None):
        with pytest.raises(TypeError, match=rf"FP4Linear: x is a {type(x).__name__}, need a Tensor"):
            layer(x)
    with pytest.raises(ValueError, match=r"FP4Linear: activations is 'int8'"):
        layer.activations = "int8"
    with pytest.raises(TypeError, match=r"FP4Linear: from_linear was given a Tensor, need an nn.Linear"):
        FP4Linear.from_linear(draw(24, 64))
    for options in ({"format": "zz"}, {"scale_rule": "zz"}, {"rotation": 17}, {"activations": "zz"}):
        with pytest.raises(ValueError, match=r"^FP4Linear: "):
            FP4Linear.from_linear(linear(), **options)
    with pytest.raises(ValueError, match=r"^FP4Linear: K = 40 is not a multiple"):
        FP4Linear.from_linear(torch.nn.Linear(40, 8))
    with pytest.raises(TypeError, match=r"FP4Linear: dtype is torch.float64, need one of torch.float32"):
        FP4Linear(64, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"convert: model is a list, need an nn.Module"):
        convert([linear()])


def test_what_no_kernel_takes_as_a_bias_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, TILED))
    layer, x = FP4Linear.from_linear(linear()), draw(2, 64)
    y = layer(x)
    for bias, error, message in (
        (layer.bias.double(), TypeError, "FP4Linear: bias is torch.float64, need one of torch.float32"),
        (layer.bias[:1], ValueError, r"FP4Linear: bias has shape \(1,\), need \(24,\)"),
    ):
        layer.bias = nn.Parameter(bias)
        for context in (torch.no_grad(), torch.enable_grad()):
            with context, pytest.raises(error, match=message):
                layer(x)
    layer = FP4Linear.from_linear(linear()).double()
    with pytest.raises(TypeError, match=r"FP4Linear: x is torch.float64, need one of"):
        layer(x.double())
    assert torch.equal(layer.float()(x), y)


@pytest.mark.parametrize("options", [{}, {"rotation": 32}, {"activations": "fp4"}], ids=str)
def test_autocast_is_followed(storage, options):
    """x is cast as nn.Linear's is, and the product is no less exact for it."""
    dense = linear()
    layer, x = FP4Linear.from_linear(dense, **options), draw(5, 64).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == dense(x).dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    if not options:
        y.sum().backward()
        assert x.grad.dtype == torch.float32
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), y)


def test_one_warning_where_weights_stay_decoded(monkeypatch):
    missing = replace(TILED, archs=("cpu",), also=lambda problem: "lacks a compiler")
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, TORCH, missing))
    nn_linear._warn_decoded.cache_clear()
    with pytest.warns(UserWarning, match=r"runs on cpu \(tiled_linear lacks a compiler\).*nibblas doctor"):
        FP4Linear.from_linear(linear())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = FP4Linear.from_linear(linear(dtype=torch.bfloat16))
    assert layer.decoded.dtype == torch.bfloat16
    exact = layer.decoded.double() * layer.weight_global_scale.double()
    assert torch.equal(exact, reference.to_float64(layer.weight_scaled))


def test_a_kernel_that_takes_packed_weights_is_stored_for_though_another_looks_faster(monkeypatch):
    slow = replace(TILED, cost=lambda problem, line: 1.0)
    slower = replace(TILED, name="slower", cost=lambda problem, line: 2.0, b_layouts=((LINEAR, LINEAR),))
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, slower, TORCH, slow))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = FP4Linear.from_linear(linear())
        packed = experts()
    assert layer.decoded is None
    for w in (layer.weight_scaled, packed._scaled("w_up")):
        assert (w.layout, w.data_layout) == (ROWS_16x1, ROWS_16x4)


def test_weights_lie_as_the_kernel_likes_them(storage):
    layer = FP4Linear.from_linear(linear(N=20, dtype=torch.bfloat16))
    w = layer.weight_scaled
    assert w.shape == (20, 64)
    if storage == "tiled":
        assert (w.layout, w.data_layout) == (ROWS_16x1, ROWS_16x4)
        assert layer.weight.shape == (32, 32)
        assert layer.decoded is None
    if storage == "decoded":
        assert (w.layout, w.data_layout) == (LINEAR, LINEAR)
    assert same_parts(w, nb.quantize(linear(N=20, dtype=torch.bfloat16).weight.detach(), nb.NVFP4))
    assert w.scale_rule == "absmax"


def test_moving_and_casting_keeps_every_bit(storage):
    layer = FP4Linear.from_linear(linear(), scale_rule="search")
    before = layer.weight_scaled
    for change in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to("cpu"), lambda m: copy.deepcopy(m)):
        layer = change(layer)
        assert same_parts(before, layer.weight_scaled)
        assert layer.weight_global_scale.dtype == torch.float32
    assert layer.dtype == layer.bias.dtype == torch.float16
    assert layer(draw(2, 64, dtype=torch.float16)).dtype == torch.float16
    decoded = layer.bfloat16().decoded
    assert decoded is None if storage == "tiled" else decoded is None or decoded.dtype == torch.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_state_dict_is_linear_and_survives_safetensors(storage, format):
    layer = FP4Linear.from_linear(linear(N=20), format, scale_rule="search", rotation=16)
    state = layer.state_dict()
    names = {"weight", "weight_scale", "bias", "_extra_state", *["weight_global_scale"] * (format == "nvfp4")}
    assert set(state) == names
    assert state["weight"].shape == (20, 32)
    assert state["weight_scale"].shape == (20, 64 // FORMATS[format].block_size)
    facts = json.loads(bytes(state["_extra_state"].tolist()))
    assert facts == {"format": format, "scale_rule": "search", "rotation": 16}

    x = draw(3, 64)
    for assign in (False, True):
        loaded = FP4Linear(64, 20, True, format)
        assert torch.equal(loaded(x), torch.zeros(3, 20))
        loaded.load_state_dict(load(save(state)), assign=assign)
        assert (loaded.scale_rule, loaded.rotation) == ("search", 16)
        assert same_parts(layer.weight_scaled, loaded.weight_scaled)
        assert torch.equal(loaded(x), layer(x))


def test_state_dict_loads_where_kernels_differ(monkeypatch):
    layer = FP4Linear.from_linear(linear(N=20))
    state = layer.state_dict()
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, TILED))
    for options in ({}, {"assign": True}):
        loaded = FP4Linear(64, 20, device="meta" if options else None)
        loaded.load_state_dict(state, **options)
        assert loaded.weight_scaled.data_layout == ROWS_16x4
        assert same_parts(layer.weight_scaled, loaded.weight_scaled)
        assert all(torch.equal(a, b) for a, b in zip(state.values(), loaded.state_dict().values(), strict=True))


def test_a_state_dict_that_does_not_fit_is_refused():
    state = {f"fc.{key}": value for key, value in FP4Linear.from_linear(linear()).state_dict().items()}

    def refusal(changes, *, format=nb.NVFP4, N=24, strict=True):
        model = nn.ModuleDict({"fc": FP4Linear(64, N, True, format)})
        changed = {key: value for key, value in {**state, **changes}.items() if value is not None}
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(changed, strict=strict)
        assert not model["fc"].weight.any()  # nothing was loaded
        return str(caught.value)

    assert "the state is of a module in nvfp4, this one is in mxfp4" in refusal({}, format=nb.MXFP4)
    assert "fc.weight: is torch.uint8 (24, 32), need torch.uint8 (16, 32)" in refusal({}, N=16)
    assert "fc.weight: is torch.float32 (24, 64)" in refusal({"fc.weight": torch.zeros(24, 64)})
    assert "fc.weight: fc.weight_scale must come with it" in refusal({"fc.weight_scale": None}, strict=False)
    assert "need torch.float32 ()" in refusal({"fc.weight_global_scale": torch.ones(3)})
    assert "fc.weight_global_scale: holds NaN or Inf" in refusal({"fc.weight_global_scale": torch.tensor(torch.nan)})
    assert "extra state is not understood" in refusal({"fc._extra_state": torch.zeros(3, dtype=torch.uint8)})
    for rotation, message in ((128, "K = 64 is not a multiple of rotation 128"), (None, "rotation is None")):
        facts = json.dumps({"format": "nvfp4", "scale_rule": "absmax", "rotation": rotation})
        assert message in refusal({"fc._extra_state": torch.tensor(list(facts.encode()), dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        FP4Linear(64, 24).load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        FP4Linear(64, 24).load_state_dict({**FP4Linear(64, 24).state_dict(), "other": torch.zeros(1)})


def experts(format="nvfp4", bias=False, **options):
    E, I, H = 5, 32, 64
    dense = draw(E, I, H, seed=2), draw(E, I, H, seed=3), draw(E, H, I, seed=4)
    biases = (draw(E, I, seed=5), draw(E, I, seed=6), draw(E, H, seed=7)) if bias else ()
    return FP4Experts.from_dense(*dense, *biases, format=format, **options)


def routing(tokens=7, top_k=2, E=5):
    generator = torch.Generator().manual_seed(8)
    ids = torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(tokens)])
    ids[1, 0] = -1
    return ids, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("swiglu_clamped", True)])
@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_moe_of_the_stored_weights(storage, format, activation, bias):
    layer, x = experts(format, bias, activation=activation), draw(7, 64)
    packed = [layer._scaled(name) for name in ("w_gate", "w_up", "w_down")]
    biases = (layer.bias_gate, layer.bias_up, layer.bias_down)
    exact = reference.moe(x, *routing(), *packed, *biases, activation=activation)
    y = layer(x, *routing()).detach()
    assert (y.double() - exact).norm() < 1e-5 * exact.norm()
    if format == "nvfp4":
        assert layer.w_gate_global_scale.shape == (5,)
        own = nb.quantize(draw(5, 32, 64, seed=2)[3], nb.NVFP4)
        assert same_parts(packed[0][3].with_layout(LINEAR, LINEAR), own)


def test_experts_state_dict_and_compile(storage):
    layer, x = experts(bias=True, scale_rule="search", rotation=32), draw(7, 64)
    loaded = FP4Experts(5, 32, 64, bias=True)
    loaded.load_state_dict(load(save(layer.state_dict())))
    assert loaded.rotation == 32
    assert torch.equal(loaded(x, *routing()), layer(x, *routing()))
    half = copy.deepcopy(layer).bfloat16()
    assert torch.equal(half.w_up_global_scale, layer.w_up_global_scale)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x, *routing()), layer(x, *routing()), rtol=1e-4, atol=1e-5)


def test_experts_under_autocast(storage):
    layer, x = experts(), draw(7, 64)
    y = layer(x, *routing())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x, *routing()), y)


def test_experts_refuse_what_does_not_fit():
    with pytest.raises(TypeError, match=r"FP4Experts: w_up is a list, need a Tensor"):
        FP4Experts.from_dense(draw(2, 32, 64), [], draw(2, 64, 32))
    with pytest.raises(TypeError, match=r"FP4Experts: x is a list, need a Tensor"):
        experts()([], *routing())
    with pytest.raises(ValueError, match=r"need \(E, I, H\), \(E, I, H\), \(E, H, I\)"):
        FP4Experts.from_dense(draw(2, 32, 64), draw(2, 32, 64), draw(2, 32, 64))
    with pytest.raises(ValueError, match=r"bias_down are given, need all or none"):
        FP4Experts.from_dense(draw(2, 32, 64), draw(2, 32, 64), draw(2, 64, 32), draw(2, 32))
    with pytest.raises(ValueError, match="w_gate holds no expert"):
        FP4Experts.from_dense(draw(0, 32, 64), draw(0, 32, 64), draw(0, 64, 32))
    with pytest.raises(TypeError, match="FP4Experts: bias_up is a int, need a Tensor"):
        FP4Experts.from_dense(draw(2, 32, 64), draw(2, 32, 64), draw(2, 64, 32), draw(2, 32), 0, draw(2, 64))
    with pytest.raises(ValueError, match=r"activation 'gelu' is unknown"):
        FP4Experts(2, 32, 64, activation="gelu")
    with pytest.raises(ValueError, match=r"K = 24 is not a multiple"):
        FP4Experts(2, 24, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.odd = nn.Linear(40, 8)
        self.attention = nn.MultiheadAttention(64, 4)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def left(model):
    return {layer.name: layer.reason for layer in conversion_report(model) if not layer.converted}


def test_convert_replaces_and_reports():
    model, ids = Model().eval(), torch.arange(12)
    before, y = copy.deepcopy(model), model(ids)
    seen = []
    assert convert(model, nb.NVFP4, "search", progress=lambda *step: seen.append(step)) is model
    converted = [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]
    assert seen == [(i, 4, name) for i, name in enumerate(converted)]
    assert [layer.name for layer in conversion_report(model) if layer.converted] == converted
    assert left(model) == {
        "blocks.0.gate": "excluded by '.gate'",
        "blocks.1.gate": "excluded by '.gate'",
        "odd": "K = 40 is not a multiple of nvfp4's block_size 16",
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear, which may do more than an nn.Linear",
        "lm_head": "excluded by '*lm_head*'",
    }
    assert type(model.blocks[0].gate) is type(model.lm_head) is nn.Linear
    assert not model.blocks[0].up.training
    assert model.blocks[0].up.bias.dtype == torch.float32
    for layer in conversion_report(model):
        dense = before.get_submodule(layer.name).weight
        assert (layer.shape, layer.elements) == (tuple(dense.shape), dense.numel())
        if layer.converted:
            w = model.get_submodule(layer.name).weight_scaled
            error = (nb.dequantize(w).double() - dense.double()).square().sum() / dense.double().square().sum()
            assert layer.relative_mse == pytest.approx(error.item(), rel=1e-5)
            assert 0.001 < layer.relative_mse < 0.01
            assert layer.nbytes == dense.numel() // 2 + dense.numel() // 16 + 4
            assert w.scale_rule == "search"
    similarity = torch.cosine_similarity(y.flatten(), model(ids).flatten(), dim=0)
    assert 0.98 < similarity < 0.99999


def test_convert_by_patterns_and_again():
    model = convert(Model(), nb.NVFP4, include="blocks.0.*")
    assert isinstance(model.blocks[0].up, FP4Linear)
    assert type(model.blocks[1].up) is nn.Linear
    assert left(model)["blocks.1.up"] == "not in include"
    convert(model, nb.MXFP4, exclude=("*.down", "lm_head"))
    formats = {layer.name: model.get_submodule(layer.name) for layer in conversion_report(model) if layer.converted}
    assert {name: layer.format.name for name, layer in formats.items()} == {
        "blocks.0.up": "nvfp4",
        "blocks.0.down": "nvfp4",
        "blocks.0.gate": "mxfp4",
        "blocks.1.up": "mxfp4",
        "blocks.1.gate": "mxfp4",
    }
    with pytest.raises(ValueError, match=r"include pattern 'layers\.\*' matches none of 2 layers"):
        convert(nn.Sequential(linear(), linear()), include="layers.*")


@pytest.mark.parametrize(
    ("name", "excluded"),
    [
        ("roberta_prelayernorm.encoder.layer.0.output.dense", False),
        ("model.embed_tokens_extend.image_embed.img_processor.encoder.layers.0.mlp.fc1", False),
        ("transformer_blocks.0.attn_norm.linear", False),
        ("transformer_blocks.0.norm1.linear", False),
        ("encoder.block.0.layer.0.SelfAttention.q", False),
        ("model.decoder.layers.0.fc1", False),
        ("model.shared_experts.up_proj", False),
        ("layers.0.mask_head.linear", False),
        ("single_transformer_blocks.0.proj_out", False),
        ("blocks.0.attention.output", False),
        ("encoder.blocks.0.0.attention.v_head", False),
        ("context_embedder.token_refiner.refiner_blocks.0.attn.to_q", False),
        ("final_layer.adaLN_modulation.1", False),
        ("double_blocks.0.img_mod.lin", False),
        ("model.embed_tokens", True),
        ("decoder.model.decoder.embed_tokens.3", True),
        ("decoder.model.decoder.lm_heads.3", True),
        ("transformer.w", True),
        ("pred_layer.proj", True),
        ("bert.embeddings.word_embeddings", True),
        ("layers.0.qkv_norm", True),
        ("encoder.pos_emb", True),
        ("model.shared", True),
        ("shared", True),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", True),
        ("time_text_embed.timestep_embedder.linear_1", True),
        ("vocab_projector", True),
        ("decoder.output_projection", True),
        ("lm_loss", True),
        ("predictions.decoder", True),
        ("text_decoder.cls.predictions.transform.dense", True),
        ("decoder", True),
        ("ctc_head", True),
        ("time_in.in_layer", True),
        ("model.diffusion_model.vector_in.out_layer", True),
        ("guidance_in.in_layer", True),
        ("t_embedder.mlp.0", True),
        ("txt_in.t_embedder.mlp.2", True),
        ("y_embedder.y_proj.fc1", True),
        ("condition_embedder.text_embedder.linear_1", True),
        ("add_embedding.linear_1", True),
        ("model.diffusion_model.label_emb.0.2", True),
        ("final_layer.linear", True),
        ("transformer.output_layer", True),
        ("output", True),
        ("language_model.output", True),
        ("score.0", True),
        ("classification_head.out_proj", True),
        ("v_head.summary", True),
        ("vocab_transform", True),
        ("generator_predictions.dense", True),
        ("discriminator_predictions.dense_prediction", True),
    ],
)
def test_what_is_left_unless_told_otherwise(name, excluded):
    assert any(matches(name, pattern) for pattern in DEFAULT_EXCLUDE) == excluded


def test_convert_takes_patterns_in_many_forms():
    for exclude in (None, DEFAULT_EXCLUDE, iter(DEFAULT_EXCLUDE)):
        assert len([r for r in conversion_report(convert(Model(), exclude=exclude)) if r.converted]) == 4
    assert [r.name for r in conversion_report(convert(Model(), include=".up")) if r.converted] == [
        "blocks.0.up",
        "blocks.1.up",
    ]
    for wrong in (5, ["*.up", 5]):
        with pytest.raises(TypeError, match="convert: exclude has a int, need str patterns"):
            convert(Model(), exclude=wrong)


def test_convert_refuses_options_and_unconverted_models():
    for options, message in (
        ({"scale_rule": "even"}, "scale_rule 'even' is unknown"),
        ({"rotation": 5}, "rotation is 5"),
        ({"activations": "int8"}, "activations is 'int8'"),
        ({"format": "fp5"}, "^convert: format 'fp5' is unknown"),
    ):
        model = Model()
        with pytest.raises(ValueError, match=message):
            convert(model, **options)
        assert not any(isinstance(module, FP4Linear) for module in model.modules())
    with pytest.raises(ValueError, match=r"did not come from nibblas\.nn\.convert"):
        conversion_report(Model())


def test_convert_of_a_linear_itself():
    layer = linear()
    new = convert(layer)
    assert isinstance(new, FP4Linear)
    assert new.bias is layer.bias
    assert conversion_report(new)[0].converted


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model, calls, quantize = Model(), [], nb.quantize

    def fails_late(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return quantize(*args, **options)

    monkeypatch.setattr(ops, "quantize", fails_late)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="no memory"):
        convert(model)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_tied_weights_stay_tied(storage):
    model = nn.ModuleDict({"a": linear(), "b": linear(seed=1), "c": linear(bias=False)})
    model["b"].weight = model["c"].weight = model["a"].weight
    model["same"] = model["b"]
    model = convert(model, exclude=())
    assert model["same"] is model["b"]
    assert [layer.reason for layer in conversion_report(model)] == ["", *["shares the weight of a"] * 2]
    assert [layer.nbytes > 0 for layer in conversion_report(model)] == [True, False, False]

    def tied(model):
        return all(model[name].weight.data_ptr() == model["a"].weight.data_ptr() for name in "bc")

    assert tied(model)
    assert tied(copy.deepcopy(model))
    assert tied(model.bfloat16())
    moved = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    assert tied(moved)
    moved.load_state_dict(model.state_dict())
    assert tied(moved)
    x = draw(3, 64, dtype=torch.bfloat16)
    for name in "abc":
        assert torch.equal(moved[name](x), model[name](x))
    assert not torch.equal(model["a"](x), model["b"](x))  # the biases are their own


@pytest.mark.parametrize("format", FORMATS)
def test_tied_weights_are_the_same_tensors_in_a_state_dict(storage, format, tmp_path):
    def tied_model(seed, **options):
        model = nn.ModuleDict({"a": linear(N=20, seed=seed), "b": linear(N=20, seed=seed + 1)})
        model["b"].weight = model["a"].weight
        return convert(model, format, exclude=(), **options)

    model, loaded, x = tied_model(0, rotation=32), tied_model(5), draw(3, 64)
    state, again = model.state_dict(), model.state_dict()
    packed = [key for key in state if key.startswith("a.weight")]
    assert len(packed) == (3 if format == "nvfp4" else 2)
    for key in packed:
        assert state[key].data_ptr() == state[key.replace("a.", "b.")].data_ptr()
        assert torch.equal(state[key], again[key])

    save_model(model, tmp_path / "tied.safetensors")
    names = set(load((tmp_path / "tied.safetensors").read_bytes()))
    assert not any(key in names and key.replace("a.", "b.") in names for key in packed)
    assert load_model(loaded, tmp_path / "tied.safetensors") == (set(), [])
    assert loaded["a"].weight.data_ptr() == loaded["b"].weight.data_ptr()
    for name in "ab":
        assert loaded[name].rotation == 32
        assert torch.equal(loaded[name](x), model[name](x))

    loaded["a"].load_state_dict(tied_model(9)["a"].state_dict())  # what is saved next is what is there then
    after = loaded.state_dict()
    assert not torch.equal(after["b.weight"], state["b.weight"])
    assert after["a.weight"].data_ptr() == after["b.weight"].data_ptr()
    assert torch.equal(after["b.weight"], loaded["b"].weight_scaled.linear_data)


def test_what_shares_a_weight_with_something_else_is_left():
    model = Model()
    convert(model, exclude=())
    assert left(model)["lm_head"] == "shares its weight with embed, which is not converted"
    assert model.lm_head.weight is model.embed.weight
    pair = nn.ModuleDict({"first": linear(), "lm_head": linear()})
    pair["first"].weight = pair["lm_head"].weight
    assert left(convert(pair))["first"] == "shares its weight with lm_head, which is not converted"


def test_layers_that_a_replacement_would_break_are_left():
    layers = nn.ModuleDict({name: linear() for name in ("hooked", "wide", "meta")})
    layers["hooked"].register_forward_hook(lambda *_: None)
    layers["wide"].double()
    layers["meta"].to("meta")
    layers["encoder"] = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    reasons = left(convert(layers))
    assert "has hooks" in reasons["hooked"]
    assert "torch.float64" in reasons["wide"]
    assert "meta device" in reasons["meta"]
    assert "TransformerEncoderLayer, which reads its weight" in reasons["encoder.linear1"]
    assert not any(isinstance(module, FP4Linear) for module in layers.modules())
    lazy = convert(nn.Sequential(nn.LazyLinear(32), nn.LazyConv1d(2, 3), nn.LazyLinear(8), linear()), exclude=["2"])
    assert [(layer.converted, layer.shape, layer.elements) for layer in conversion_report(lazy)] == [
        (False, (), 0), (False, (), 0), (True, (24, 64), 24 * 64)
    ]  # fmt: skip
    assert left(lazy) == {"0": "is lazy, and has no weights before its first call", "2": "excluded by '2'"}
    reasons = left(convert(nn.ModuleDict({"a": linear(K=48)}), rotation=32))
    assert reasons["a"] == "K = 48 is not a multiple of rotation 32"


class Fused(nn.Module):
    """Fused experts as transformers 5 makes them, in each of the arrangements of their weights."""

    def __init__(self, *, transposed, concatenated, bias, gate):
        super().__init__()
        E, I, H = 5, 32, 64
        self.is_transposed, self.is_concatenated, self.has_bias = transposed, concatenated, bias
        self.has_gate, self.gate = True, gate
        gate_up, down = draw(E, 2 * I, H, seed=2) / 8, draw(E, H, I, seed=3) / 6
        self.gate_up_proj = nn.Parameter(gate_up.mT.contiguous() if transposed else gate_up)
        self.down_proj = nn.Parameter(down.mT.contiguous() if transposed else down)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(draw(E, 2 * I, seed=4))
            self.down_proj_bias = nn.Parameter(draw(E, H, seed=5))

    def _apply_gate(self, gate_up):
        halves = gate_up.chunk(2, -1) if self.is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])
        return self.gate(*halves)

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        out = torch.zeros_like(hidden_states)
        for token, (ids, factors) in enumerate(zip(router_indices, routing_weights, strict=True)):
            for e, factor in zip(ids.tolist(), factors, strict=True):
                if e < len(self.down_proj):
                    gate_up, down = self.gate_up_proj[e], self.down_proj[e]
                    if not self.is_transposed:
                        gate_up, down = gate_up.T, down.T
                    hidden = hidden_states[token] @ gate_up + (self.gate_up_proj_bias[e] if self.has_bias else 0)
                    y = self._apply_gate(hidden) @ down + (self.down_proj_bias[e] if self.has_bias else 0)
                    out[token] += factor * y
        return out


def silu(gate, up):
    return nn.functional.silu(gate) * up


def clamped(gate, up):
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@torch.no_grad()
def round_weights(module, format):
    """Give a fused module weights that survive quantization: what it computes is then the exact answer."""
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)
        for e in range(len(weight)):
            matrix = weight[e].mT if module.is_transposed else weight[e]
            matrix.copy_(matrix.sign() * 2.0 ** matrix.abs().log2().round().clamp(-3, -1))
            matrix[:, :: format.block_size] = 0.75  # a scale of 1/8 in every block


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize(("gate", "bias"), [(silu, False), (clamped, True)])
def test_fused_experts_become_fp4_behind_their_own_forward(transposed, concatenated, gate, bias, tmp_path):
    model = nn.Module()
    model.experts = Fused(transposed=transposed, concatenated=concatenated, bias=bias, gate=gate)
    round_weights(model.experts, nb.MXFP4)
    ids, factors = routing()
    x, ids = draw(7, 64), ids.masked_fill(ids < 0, 5)  # an id of num_experts is none
    expected = model.experts(x, ids, factors)
    convert(model, nb.MXFP4)
    assert isinstance(model.experts, FP4Experts)
    (report,) = conversion_report(model)
    assert (report.name, report.converted, report.shape) == ("experts", True, (5, 64, 64))
    assert report.relative_mse == 0
    assert report.elements == 3 * 5 * 32 * 64
    y = model.experts(x, router_indices=ids, routing_weights=factors)
    save_file(model.state_dict(), tmp_path / "experts.safetensors")  # which takes no tensor that is part of another
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.experts(x, ids, routing_weights=factors), y)
    assert expected.norm() > 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "gate", lambda gate, up: gate.clamp(max=3) * up), "gate is none of silu"),
        (lambda m: setattr(m, "has_gate", False), "another structure"),
        (lambda m: setattr(m, "_is_expert_parallel", True), "spread over devices"),
        (lambda m: delattr(m, "is_transposed"), "without the marks of transformers 5"),
        (lambda m: setattr(m, "extra", nn.Parameter(torch.ones(3))), "parameters down_proj, extra, gate_up_proj"),
    ],
)
def test_fused_experts_that_are_not_known_are_left(change, reason):
    model = nn.Module()
    model.experts = Fused(transposed=False, concatenated=True, bias=False, gate=silu)
    change(model.experts)
    assert reason in left(convert(model))["experts"]
    assert isinstance(model.experts, Fused)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_of_transformers(name):
    transformers = pytest.importorskip("transformers", minversion="5")
    common = dict(vocab_size=97, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    common |= dict(head_dim=16, num_experts_per_tok=2)
    if name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, num_experts=5, moe_intermediate_size=32)
    else:
        config = transformers.GptOssConfig(**common, num_local_experts=5, intermediate_size=32)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    mlp = model.model.layers[0].mlp
    round_weights(mlp.experts, nb.MXFP4)
    hidden = draw(2, 7, 64)

    def run():
        y = mlp(hidden)
        return y[0] if isinstance(y, tuple) else y

    with torch.no_grad():
        expected = run()
        convert(model, nb.MXFP4)
        assert isinstance(mlp.experts, FP4Experts)
        assert left(model) == {"lm_head": "excluded by '*lm_head*'"}
        assert torch.allclose(run(), expected, rtol=1e-4, atol=1e-4)
        assert model(torch.arange(9)[None]).logits.isfinite().all()


def test_a_default_dtype_does_not_touch_the_global_scale():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = FP4Linear(64, 24)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.bias.dtype == layer.dtype == torch.bfloat16
    layer.load_state_dict(FP4Linear.from_linear(linear()).state_dict())
    assert same_parts(layer.weight_scaled, FP4Linear.from_linear(linear()).weight_scaled)


def test_layouts_that_recode_keep_values_through_a_state_dict(monkeypatch):
    """Hopper's layouts have no zero and no negative scale: codes change with them, values don't."""
    fragments = ((FRAGMENT_SCALES_NVFP4, FRAGMENTS_NVFP4),)
    kernel = replace(TILED, name="fragments", b_layouts=fragments)
    monkeypatch.setattr(dispatch, "kernels", lambda: (*REST, kernel))
    dispatch.forget()
    plain = FP4Linear.from_linear(linear(), nb.NVFP4).state_dict()
    plain["weight_scale"][0, :3] = torch.tensor([0, 0xB8, 0x38], dtype=torch.uint8)
    want = reference.to_float64(nb.ScaledTensor(plain["weight"], plain["weight_scale"], nb.NVFP4))
    layer = FP4Linear(64, 24, format=nb.NVFP4)
    layer.load_state_dict(plain)
    assert layer.weight_scaled.layout == FRAGMENT_SCALES_NVFP4
    again = layer.state_dict()
    got = reference.to_float64(nb.ScaledTensor(again["weight"], again["weight_scale"], nb.NVFP4))
    assert torch.equal(got, want)
    dispatch.forget()
