"""Quantizing a checkpoint in pieces: the same bytes as in one piece, however often it was killed."""

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblas import storage
from nibblas.checkpoint import stream
from nibblas.checkpoint.stream import quantize_checkpoint
from nibblas.formats import FORMATS
from nibblas.nn import DEFAULT_EXCLUDE, conversion_report, convert
from nibblas.ops import dequantize
from nibblas.quantize import quantize
from nibblas.storage import StorageError
from nibblas.tensor import ScaledTensor

ROWS = [(format.name, rule) for format in FORMATS.values() for rule in format.scale_rules]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    bad = draw(4, 128)
    bad[1, 3], bad[2, 40] = torch.nan, -torch.inf
    return {
        "model.embed_tokens.weight": draw(32, 128),
        "model.layers.0.self_attn.q_proj.weight": draw(96, 128),
        "model.layers.0.self_attn.q_proj.bias": draw(96),
        "model.layers.0.mlp.gate.weight": draw(4, 128),
        "model.layers.0.mlp.experts.up.weight": draw(3, 40, 128, dtype=torch.float16),
        "model.layers.0.conv.weight": draw(3, 40, 128),
        "model.layers.0.input_layernorm.weight": draw(128),
        "model.layers.1.wide.weight": draw(5, 1024, dtype=torch.float32),
        "model.layers.1.odd.weight": draw(8, 72),
        "model.layers.1.bad.weight": bad,
        "model.layers.1.zero.weight": torch.zeros(4, 128),
        "model.layers.1.empty.weight": torch.zeros(0, 128),
        "model.layers.1.int.weight": torch.arange(256).reshape(2, 128),
        "model.layers.1.scalar.weight": torch.tensor(2.0),
        "lm_head.weight": draw(32, 128),
    }


QUANTIZED = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.experts.up.weight",
    "model.layers.1.wide.weight",
    "model.layers.1.bad.weight",
    "model.layers.1.zero.weight",
    "model.layers.1.empty.weight",
}


@pytest.fixture
def folder(tmp_path):
    """Two shards, an index, and what lies beside them."""
    src = tmp_path / "src"
    (src / "extra").mkdir(parents=True)
    tensors = weights()
    weight_map = {name: f"model-{1 + (i >= 5)}-of-2.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        shard = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(shard, src / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1, "total_parameters": 7}, "weight_map": weight_map}
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    (src / "config.json").write_text(json.dumps({"model_type": "tiny", "tie_word_embeddings": False}))
    (src / "tokenizer.json").write_text('{"ü": 1}')
    (src / "extra" / "template.jinja").write_text("{{ x }}")
    (src / "pytorch_model.bin").write_bytes(b"old")
    (src / "consolidated.safetensors").write_bytes(b"other")
    (src / ".cache").write_text("")
    return src


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_folder(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= storage.load(path)
    return found


def assert_equal_bytes(a, b):
    assert storage.parts("x", a).keys() == storage.parts("x", b).keys()
    for x, y in zip(storage.parts("x", a).values(), storage.parts("x", b).values(), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(storage.as_bytes(x), storage.as_bytes(y))


@pytest.mark.parametrize("rotation", [0, 128])
@pytest.mark.parametrize(("format", "rule"), ROWS)
def test_equals_quantize_of_the_whole(folder, tmp_path, monkeypatch, format, rule, rotation):
    # Rows of 256 and 512 bytes: three or six a chunk, 4 KiB rows one by one.
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1700)
    quantize_checkpoint(folder, tmp_path / "out", format, scale_rule=rule, rotation=rotation)
    got = load_folder(tmp_path / "out")
    source = weights()
    assert got.keys() == source.keys()
    assert {name for name, tensor in got.items() if isinstance(tensor, ScaledTensor)} == QUANTIZED
    for name, tensor in source.items():
        want = quantize(tensor, format, scale_rule=rule, rotation=rotation) if name in QUANTIZED else tensor
        assert_equal_bytes(got[name], want)
        if name in QUANTIZED:
            assert storage.facts(got[name]) == storage.facts(want)


def test_the_folder_and_the_summary(folder, tmp_path):
    calls = []
    summary = quantize_checkpoint(folder, tmp_path / "out", "nvfp4", progress=lambda *call: calls.append(call))
    out = contents(tmp_path / "out")
    assert set(out) == {
        "config.json",
        "tokenizer.json",
        "extra/template.jinja",
        "model.safetensors.index.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    }
    assert out["tokenizer.json"] == contents(folder)["tokenizer.json"]
    assert summary.left_out == (".cache", "consolidated.safetensors", "pytorch_model.bin")
    config = json.loads(out["config.json"])
    assert config["model_type"] == "tiny"
    assert config["quantization_config"]["quant_method"] == "nibblas"
    assert config["quantization_config"]["format"] == "nvfp4"
    assert config["quantization_config"]["scale_rule"] == "absmax"

    index = json.loads(out["model.safetensors.index.json"])
    stored = {}
    for file in ("model-1-of-2.safetensors", "model-2-of-2.safetensors"):
        stored |= {name: (file, entry) for name, entry in storage.read_header(tmp_path / "out" / file).entries.items()}
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    after = sum(entry.nbytes for _, entry in stored.values())
    assert index["metadata"] == {"total_size": after, "total_parameters": 7, "quant_method": "nibblas"}

    assert (summary.bytes_before, summary.bytes_after) == (sum(t.nbytes for t in weights().values()), after)
    assert {tensor.name for tensor in summary.quantized} == QUANTIZED
    by_name = {tensor.name: tensor for tensor in summary.quantized}
    q = by_name["model.layers.0.self_attn.q_proj.weight"]
    assert (q.shape, q.bytes_before, q.bytes_after) == ((96, 128), 96 * 128 * 2, 96 * 64 + 96 * 8 + 4)
    x = weights()[q.name].double()
    whole = load_folder(tmp_path / "out")[q.name]
    error = (dequantize(whole).double() - x).square().sum() / x.square().sum()
    assert q.relative_mse == pytest.approx(error.item(), rel=1e-6)
    assert 0.007 < q.relative_mse < 0.011
    assert by_name["model.layers.1.zero.weight"].relative_mse == 0
    bad = by_name["model.layers.1.bad.weight"]
    assert (bad.relative_mse, bad.bad_blocks) == (None, 2)
    assert sum(tensor.bad_blocks for tensor in summary.quantized) == 2
    reasons = {skip.name: skip.reason for skip in summary.skipped}
    assert reasons == {
        "model.embed_tokens.weight": "excluded by .*embed*",
        "model.layers.0.self_attn.q_proj.bias": "its name matches none of *.weight",
        "model.layers.0.mlp.gate.weight": "excluded by .gate",
        "model.layers.0.conv.weight": "3 dimensions, need 2 (3 for experts)",
        "model.layers.0.input_layernorm.weight": "excluded by .*norm*",
        "model.layers.1.odd.weight": "K = 72 is not a multiple of 16",
        "model.layers.1.int.weight": "dtype I64, need F32, BF16, F16",
        "model.layers.1.scalar.weight": "0 dimensions, need 2 (3 for experts)",
        "lm_head.weight": "excluded by *lm_head*",
    }
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][0] == calls[-1][1]
    assert {name for *_, name in calls} >= QUANTIZED - {"model.layers.1.empty.weight"}


def test_a_checkpoint_and_a_model_leave_the_same_layers(tmp_path):
    left = ["embed_out", "norm", "lm_head", "head", "classifier", "pooler", "router", "gate", "shared_expert_gate"]
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(32, 8, bias=False) for name in (*left, "up", "gate_proj", "overhead")}
    )
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(32, 8), "layers": torch.nn.ModuleList([model])})
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    summary = quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "nvfp4")
    converted = {layer.name for layer in conversion_report(convert(model)) if layer.converted}
    assert converted == {f"layers.0.{name}" for name in ("up", "gate_proj", "overhead")}
    assert {tensor.name for tensor in summary.quantized} == {f"{name}.weight" for name in converted}


def test_one_file_and_patterns(tmp_path):
    save_file(weights(), tmp_path / "a.safetensors")
    summary = quantize_checkpoint(
        tmp_path / "a.safetensors",
        tmp_path / "new" / "b.safetensors",
        "mxfp4",
        include=["*q_proj*", "*.conv", "lm_head.weight"],
        exclude=[],
    )
    one = quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "one.safetensors", "mxfp4", include="*q_proj*")
    assert [tensor.name for tensor in one.quantized] == ["model.layers.0.self_attn.q_proj.weight"]
    quantized = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.conv.weight", "lm_head.weight"}
    assert {tensor.name for tensor in summary.quantized} == quantized
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b.safetensors"]
    got = storage.load(tmp_path / "new" / "b.safetensors")
    assert_equal_bytes(got["model.layers.0.conv.weight"], quantize(weights()["model.layers.0.conv.weight"], "mxfp4"))


def test_saving_what_was_loaded_gives_the_same_file(folder, tmp_path):
    quantize_checkpoint(folder, tmp_path / "out", "nvfp4")
    path = tmp_path / "out" / "model-1-of-2.safetensors"
    metadata = {key: text for key, text in storage.read_header(path).metadata.items() if key != "nibblas"}
    assert metadata["format"] == "pt"
    storage.save(tmp_path / "again", storage.load(path), metadata)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_weights_stay_as_they_are(tmp_path, head):
    src = tmp_path / "src"
    src.mkdir()
    tensors = weights()
    tensors.pop("lm_head.weight")
    if head != "absent":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * (1 if head == "equal" else 2)
    save_file(tensors, src / "model.safetensors")
    (src / "config.json").write_text('{"tie_word_embeddings": true}')
    quantize_checkpoint(src, tmp_path / "out", "nvfp4")
    got = storage.load(tmp_path / "out" / "model.safetensors")
    assert got.keys() == tensors.keys()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in tensors:
            assert_equal_bytes(got[name], tensors[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


class Killed(BaseException):
    pass


def test_goes_on_after_being_stopped_anywhere(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1700)
    quantize_checkpoint(folder, tmp_path / "want", "nvfp4")
    want = contents(tmp_path / "want")
    steps = []
    quantize_checkpoint(folder, tmp_path / "count", "nvfp4", progress=lambda *call: steps.append(call))
    assert len(steps) > 100
    for stop in range(0, len(steps), 7):
        out = tmp_path / f"stop{stop}"
        left = stop

        def kill(*call):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1

        with pytest.raises(Killed):
            quantize_checkpoint(folder, out, "nvfp4", progress=kill)
        names = {path.name for path in out.iterdir()}
        assert sum(name.endswith(".partial") for name in names) == 1
        assert names <= {
            "model-1-of-2.safetensors",
            "model-1-of-2.safetensors.partial",
            "model-2-of-2.safetensors.partial",
        }
        summary = quantize_checkpoint(folder, out, "nvfp4")
        assert contents(out) == want
        assert summary.reused == tuple(sorted(name for name in names if name.endswith(".safetensors")))
        shutil.rmtree(out)


@pytest.mark.parametrize("lost", [0, 1])
def test_does_not_repeat_finished_work(folder, tmp_path, monkeypatch, lost):
    quantize_checkpoint(folder, tmp_path / "out", "nvfp4")
    want = contents(tmp_path / "out")
    target = tmp_path / "out" / "model-2-of-2.safetensors"
    header = storage.read_header(target)
    end = header.data_start + header.entries["model.layers.1.wide.weight.scale"].end
    (tmp_path / "out" / "model-2-of-2.safetensors.partial").write_bytes(target.read_bytes()[: end - lost])
    target.unlink()
    done = []
    counted = stream.quantize
    monkeypatch.setattr(stream, "quantize", lambda x, *a, **k: done.append(tuple(x.shape)) or counted(x, *a, **k))
    summary = quantize_checkpoint(folder, tmp_path / "out", "nvfp4")
    assert contents(tmp_path / "out") == want
    # The tensor that lost its last byte, and the one after it.
    assert done == [(5, 1024)] * lost + [(4, 128)]
    mse = {tensor.name: tensor.relative_mse for tensor in summary.quantized}
    assert mse["model.layers.1.zero.weight"] == 0
    assert (mse["model.layers.1.wide.weight"] is None) == (lost == 0)
    assert mse["model.layers.1.bad.weight"] is None


@pytest.mark.parametrize("keep", [0, 5, 200, None])
def test_a_partial_that_stops_in_its_header(folder, tmp_path, keep):
    quantize_checkpoint(folder, tmp_path / "out", "mxfp4")
    want = contents(tmp_path / "out")
    target = tmp_path / "out" / "model-1-of-2.safetensors"
    raw = target.read_bytes()[: storage.read_header(target).data_start]
    (tmp_path / "out" / "model-1-of-2.safetensors.partial").write_bytes(raw[:keep])
    target.unlink()
    quantize_checkpoint(folder, tmp_path / "out", "mxfp4")
    assert contents(tmp_path / "out") == want


def test_other_options_or_sources_are_refused_unless_overwritten(folder, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(folder, out, "nvfp4")
    first = contents(out)
    with pytest.raises(StorageError, match=r"model-1-of-2\.safetensors, .*another source or with other options"):
        quantize_checkpoint(folder, out, "mxfp4")
    with pytest.raises(StorageError, match="other options"):
        quantize_checkpoint(folder, out, "nvfp4", exclude=DEFAULT_EXCLUDE[1:])
    # Same header, same size, other weights.
    other = shutil.copytree(folder, tmp_path / "other")
    for path in other.glob("model*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(StorageError, match="other options"):
        quantize_checkpoint(other, out, "nvfp4")
    assert contents(out) == first
    shutil.copy(out / "model-1-of-2.safetensors", out / "model.safetensors")
    with pytest.raises(StorageError, match=r"quantize: .*out/model\.safetensors would be replaced or removed; choose"):
        quantize_checkpoint(folder, out, "nvfp4")
    quantize_checkpoint(folder, out, "mxfp4", overwrite=True)
    assert not (out / "model.safetensors").exists()
    assert {type(tensor) for tensor in load_folder(out).values()} == {torch.Tensor, ScaledTensor}
    quantize_checkpoint(folder, tmp_path / "mx", "mxfp4")
    assert contents(out) == contents(tmp_path / "mx")


def test_the_files_of_others_are_no_earlier_run_s(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (folder / "README.md").write_text("of the model")
    for name in ("README.md", "config.json", "model-1-of-2.safetensors"):
        (out / name).write_text('{"mine": 1}')
    (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (out / "notes.md").write_text("mine")
    before = contents(out)
    with pytest.raises(
        StorageError,
        match=r"^quantize: \S+/model-1-of-2\.safetensors, \S+/README\.md, \S+/config\.json would be replaced or "
        r"removed; choose another output, move these away, or overwrite$",
    ):
        quantize_checkpoint(folder, out, "nvfp4")
    assert contents(out) == before
    quantize_checkpoint(folder, out, "nvfp4", overwrite=True)
    quantize_checkpoint(folder, tmp_path / "want", "nvfp4")
    assert contents(out) == contents(tmp_path / "want") | {"notes.md": b"mine"}


def test_weights_of_an_earlier_run_say_nothing_of_the_files_beside_them(tmp_path):
    one, out = tmp_path / "one", tmp_path / "out"
    one.mkdir()
    save_file(weights(), one / "model.safetensors")
    for name in ("README.md", "config.json"):
        (one / name).write_text('{"theirs": 1}')
    out.mkdir()
    for name in ("README.md", "config.json"):
        (out / name).write_text('{"mine": 1}')
    quantize_checkpoint(one / "model.safetensors", out / "model.safetensors", "nvfp4")
    before = contents(out)
    with pytest.raises(StorageError, match=r"^quantize: \S+/README\.md, \S+/config\.json would be replaced"):
        quantize_checkpoint(one, out, "nvfp4")
    assert contents(out) == before
    for name in ("README.md", "config.json"):
        (out / name).rename(tmp_path / name)
    assert quantize_checkpoint(one, out, "nvfp4").reused == ("model.safetensors",)
    (out / "README.md").write_text("edited")
    with pytest.raises(StorageError, match=r"^quantize: \S+/README\.md would be replaced"):
        quantize_checkpoint(one, out, "nvfp4")
    assert (out / "README.md").read_text() == "edited"


def test_the_files_of_an_earlier_run_are_no_conflict(folder, tmp_path, monkeypatch):
    def stop(path, content):
        if len(written) == left:
            raise Killed
        written.append(path.name)
        write(path, content)

    (folder / "model.safetensors.sha256").write_text("is no weight")
    quantize_checkpoint(folder, tmp_path / "want", "nvfp4")
    want = contents(tmp_path / "want")
    write = stream._write
    for left in range(5):
        out, written = tmp_path / f"out{left}", []
        monkeypatch.setattr(stream, "_write", stop)
        with pytest.raises(Killed):
            quantize_checkpoint(folder, out, "nvfp4")
        monkeypatch.setattr(stream, "_write", write)
        assert set(contents(out)) == {"model-1-of-2.safetensors", "model-2-of-2.safetensors"} | {
            name for name in want if Path(name).name in written
        }
        for _ in range(2):
            assert len(quantize_checkpoint(folder, out, "nvfp4").reused) == 2
            assert contents(out) == want


@pytest.mark.parametrize("overwrite", [False, True])
def test_weights_that_no_run_made_are_never_removed(folder, tmp_path, overwrite):
    out = tmp_path / "out"
    quantize_checkpoint(folder, out, "nvfp4")
    shutil.copy(out / "model-1-of-2.safetensors", out / "old.safetensors")
    save_file({"w": torch.ones(2)}, out / "precious.safetensors")
    (out / "other.safetensors.index.json").write_text('{"weight_map": {"w": "precious.safetensors"}}')
    (out / "folder.safetensors").mkdir()
    before = contents(out)
    with pytest.raises(
        StorageError,
        match=r"^quantize: \S+out/folder\.safetensors, \S+out/other\.safetensors\.index\.json, "
        r"\S+out/precious\.safetensors: weights that `nibblas quantize` did not make .*another folder, or remove them$",
    ):
        quantize_checkpoint(folder, out, "mxfp4", overwrite=overwrite)
    assert contents(out) == before


def test_an_earlier_run_s_shards_and_index_are_removed(folder, tmp_path):
    out, one = tmp_path / "out", tmp_path / "one"
    quantize_checkpoint(folder, out, "nvfp4")
    (out / "model-3-of-3.safetensors.partial").write_bytes((out / "model-1-of-2.safetensors").read_bytes()[:-9])
    one.mkdir()
    save_file(weights(), one / "model.safetensors")
    with pytest.raises(StorageError, match=r"model-2-of-2.*another source.*; \S+index\.json would be replaced or rem"):
        quantize_checkpoint(one, out, "nvfp4")
    quantize_checkpoint(one, out, "nvfp4", overwrite=True)
    assert set(contents(out)) == {"model.safetensors", "config.json", "tokenizer.json", "extra/template.jinja"}


@pytest.mark.parametrize("lost", [1, 2])
def test_an_index_is_known_without_its_shards(folder, tmp_path, lost):
    out, one = tmp_path / "out", tmp_path / "one"
    quantize_checkpoint(folder, out, "nvfp4")
    for name in ("model-1-of-2.safetensors", "model-2-of-2.safetensors")[:lost]:
        (out / name).unlink()
    one.mkdir()
    save_file(weights(), one / "model.safetensors")
    quantize_checkpoint(one, out, "nvfp4", overwrite=True)
    assert set(contents(out)) == {"model.safetensors", "config.json", "tokenizer.json", "extra/template.jinja"}


def test_what_a_killed_run_with_overwrite_left_is_removed(folder, tmp_path):
    def stop(*call):
        raise Killed

    out, one, three = tmp_path / "out", tmp_path / "one", shutil.copytree(folder, tmp_path / "three")
    quantize_checkpoint(folder, out, "nvfp4")
    index = json.loads((three / "model.safetensors.index.json").read_text())
    for i, name in enumerate(sorted(set(index["weight_map"].values()))):
        (three / name).rename(three / f"{i}-of-3.safetensors")
        index["weight_map"] |= {
            tensor: f"{i}-of-3.safetensors" for tensor, file in index["weight_map"].items() if file == name
        }
    index["weight_map"]["last.weight"] = "2-of-3.safetensors"
    save_file({"last.weight": torch.ones(4, 128)}, three / "2-of-3.safetensors")
    (three / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Killed):
        quantize_checkpoint(three, out, "nvfp4", overwrite=True, progress=stop)
    left = {path.name for path in out.iterdir() if "safetensors" in path.name}
    assert left == {"0-of-3.safetensors.partial", "model.safetensors.index.json"}
    one.mkdir()
    save_file(weights(), one / "model.safetensors")
    quantize_checkpoint(one, out, "nvfp4", overwrite=True)
    assert set(contents(out)) == {"model.safetensors", "config.json", "tokenizer.json", "extra/template.jinja"}


@pytest.mark.parametrize("keep", [0, 5, 8, 9, 200])
def test_another_partial_that_stops_in_its_header_is_removed(folder, tmp_path, keep):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.safetensors.partial").write_bytes((folder / "model-1-of-2.safetensors").read_bytes()[:keep])
    with pytest.raises(StorageError, match=r"old\.safetensors\.partial would be replaced or removed"):
        quantize_checkpoint(folder, out, "nvfp4")
    quantize_checkpoint(folder, out, "nvfp4", overwrite=True)
    assert not (out / "old.safetensors.partial").exists()


@pytest.mark.parametrize("name", ["old.safetensors.partial", "old.safetensors"])
def test_the_start_of_a_file_of_others_is_not_removed(folder, tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir()
    source = folder / "model-1-of-2.safetensors"
    end = storage.read_header(source).data_start
    foreign = [source.read_bytes()[:end], source.read_bytes()[: end + 9], b"precious{}", bytes(9)]
    for content in foreign if path.suffix == ".partial" else [*foreign, b"", source.read_bytes()[:200]]:
        path.write_bytes(content)
        with pytest.raises(StorageError, match="did not make"):
            quantize_checkpoint(folder, tmp_path / "out", "nvfp4", overwrite=True)
        assert path.read_bytes() == content


def test_only_regular_files_are_replaced(folder, tmp_path):
    source, pipe = folder / "model-1-of-2.safetensors", tmp_path / "pipe"
    os.mkfifo(pipe)
    for overwrite in (False, True):
        with pytest.raises(StorageError, match="pipe is a device, pipe or socket, need a regular file"):
            quantize_checkpoint(source, pipe, "nvfp4", overwrite=overwrite)
    assert pipe.is_fifo()
    out = tmp_path / "out"
    out.mkdir()
    (out / "extra").write_text("a file")
    with pytest.raises(StorageError, match=r"template\.jinja would lie in a file"):
        quantize_checkpoint(folder, out, "nvfp4", overwrite=True)
    (out / "extra").unlink()
    (out / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(StorageError, match=r"out/config\.json is a link"):
        quantize_checkpoint(folder, out, "nvfp4", overwrite=True)
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_a_change_of_one_byte_is_noticed(tmp_path):
    src, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    # 8 MB, of which samples would see 256 KB.
    big = torch.ones(2048, 2048, dtype=torch.bfloat16)
    save_file({"big.weight": big, "small.weight": torch.ones(1, 16, dtype=torch.bfloat16)}, src)
    quantize_checkpoint(src, out, "mxfp4", include=["big*"])
    before = out.read_bytes()
    status, header = src.stat(), storage.read_header(src)
    position = header.data_start + header.entries["small.weight"].start
    with open(src, "r+b") as file:
        file.seek(position)
        file.write(b"\x12\x34")
    os.utime(src, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(StorageError, match="overwrite"):
        quantize_checkpoint(src, out, "mxfp4", include=["big*"])
    assert out.read_bytes() == before
    quantize_checkpoint(src, out, "mxfp4", include=["big*"], overwrite=True)
    assert_equal_bytes(storage.load(out)["small.weight"], load_file(src)["small.weight"])


def test_overwrite_keeps_nothing(folder, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(folder, out, "nvfp4")
    want = contents(out)
    for file in ("model-1-of-2.safetensors", "model-2-of-2.safetensors"):
        damaged = want[file][:-500] + bytes(500)
        (out / file).write_bytes(damaged)
        (out / f"{file}.partial").write_bytes(damaged)
    summary = quantize_checkpoint(folder, out, "nvfp4", overwrite=True)
    assert summary.reused == ()
    assert contents(out) == want


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_partial_of_other_options(folder, tmp_path, overwrite):
    def stop(*call):
        raise Killed

    with pytest.raises(Killed):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4", progress=stop)
    if not overwrite:
        with pytest.raises(StorageError, match=r"model-1-of-2\.safetensors\.partial was made"):
            quantize_checkpoint(folder, tmp_path / "out", "mxfp4")
    else:
        with open(tmp_path / "out" / "model-1-of-2.safetensors.partial", "ab") as file:
            file.write(bytes(1 << 20))
        quantize_checkpoint(folder, tmp_path / "out", "mxfp4", overwrite=True)
        quantize_checkpoint(folder, tmp_path / "want", "mxfp4")
        assert contents(tmp_path / "out") == contents(tmp_path / "want")


@pytest.mark.parametrize("config", [{"model_type": "gpt2"}, {"model_type": "both", "decoder": {"model_type": "gpt2"}}])
def test_weights_that_lie_the_other_way_are_refused(tmp_path, config):
    names = ("h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight", "h.0.mlp.other.weight")
    src, out = tmp_path / "src" / "model.safetensors", tmp_path / "out"
    src.parent.mkdir()
    save_file({name: torch.ones(32, 64) for name in names}, src)
    (src.parent / "config.json").write_text(json.dumps(config))
    for source in (src, src.parent):
        with pytest.raises(
            StorageError,
            match=r"^quantize: .*h\.0\.attn\.c_attn\.weight is \(\.\.\., K, N\) in models of model_type 'gpt2', need .*"
            r"exclude \*\.c_attn\.weight, \*\.c_fc\.weight$",
        ):
            quantize_checkpoint(source, out, "nvfp4")
    assert not out.exists()
    summary = quantize_checkpoint(src.parent, out, "nvfp4", exclude=["*.c_attn.weight", "*.c_fc.weight"])
    assert [tensor.name for tensor in summary.quantized] == [names[-1]]


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff"])
def test_a_broken_config_stops_folders_alone(tmp_path, text):
    src = tmp_path / "src" / "model.safetensors"
    src.parent.mkdir()
    save_file({"up.weight": torch.ones(32, 64)}, src)
    (src.parent / "config.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"config\.json: "):
        quantize_checkpoint(src.parent, tmp_path / "folder", "nvfp4")
    summary = quantize_checkpoint(src, tmp_path / "out", "nvfp4")
    assert [tensor.name for tensor in summary.quantized] == ["up.weight"]


@pytest.mark.parametrize("model_type", ["aria", "aria_text"])
def test_the_experts_of_aria_lie_the_other_way(tmp_path, model_type):
    experts = [f"language_model.model.layers.0.mlp.experts.{fc}.weight" for fc in ("fc1", "fc2")]
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    (src / "config.json").write_text(json.dumps({"model_type": model_type}))
    tensors = {name: torch.ones(2, 32, 64) for name in experts}
    save_file(tensors | {"mlp.shared_experts.up_proj.weight": torch.ones(32, 64)}, src / "model.safetensors")
    with pytest.raises(StorageError, match=r"exclude \*\.experts\.fc1\.weight, \*\.experts\.fc2\.weight$"):
        quantize_checkpoint(src, out, "nvfp4")
    summary = quantize_checkpoint(src, out, "nvfp4", exclude=["*.experts.fc1.weight", "*.experts.fc2.weight"])
    assert [tensor.name for tensor in summary.quantized] == ["mlp.shared_experts.up_proj.weight"]


def test_refusals(folder, tmp_path):
    with pytest.raises(StorageError, match="lies inside it"):
        quantize_checkpoint(folder, folder / "deep" / "out", "nvfp4")
    with pytest.raises(StorageError, match="is the source"):
        quantize_checkpoint(folder, tmp_path / "x" / ".." / "src", "nvfp4")
    with pytest.raises(ValueError, match=r"^quantize: format 'int4' is unknown"):
        quantize_checkpoint(folder, tmp_path / "out", "int4")
    with pytest.raises(ValueError, match="scale_rule 'even' is unknown"):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4", scale_rule="even")
    with pytest.raises(ValueError, match=r"^quantize: rotation is 24, need 0 or one of 16"):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4", rotation=24)
    with pytest.raises(StorageError, match=r"nothing to quantize.*q_proj\.weight: its name matches none of \*\.odd"):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4", include=["*.odd"])
    with pytest.raises(StorageError, match=r"\(exclude wins over include\)\. lm_head\.weight: excluded by"):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4", include=["*lm_head*"])
    for options in ({"include": ["*q_proj*", "*.wait"]}, {"exclude": [*DEFAULT_EXCLUDE, "*.wait"]}):
        with pytest.raises(ValueError, match=r"clude pattern '\*\.wait' matches none of the 15 tensors of .*src"):
            quantize_checkpoint(folder, tmp_path / "out", "nvfp4", **options)
    with pytest.raises(ValueError, match=r"of .*model-1-of-2\.safetensors, which is one shard: the folder .*src would"):
        quantize_checkpoint(folder / "model-1-of-2.safetensors", tmp_path / "out", "nvfp4", include="*.wait")
    with pytest.raises(TypeError, match="quantize: include has a int"):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4", include=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"the output is one; .*file is a file"):
        quantize_checkpoint(folder, tmp_path / "file", "nvfp4")
    with pytest.raises(StorageError, match="is a file, so the output is one"):
        quantize_checkpoint(folder / "model-1-of-2.safetensors", tmp_path, "nvfp4")
    with pytest.raises(StorageError, match="need an index of shards or one safetensors file, found none"):
        quantize_checkpoint(folder / "extra", tmp_path / "out", "nvfp4")
    with pytest.raises(FileNotFoundError):
        quantize_checkpoint(tmp_path / "none", tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_strict_refuses_nan_and_inf(folder, tmp_path, format):
    with pytest.raises(
        StorageError, match=r"model-2-of-2\.safetensors: model\.layers\.1\.bad\.weight holds NaN or Inf"
    ):
        quantize_checkpoint(folder, tmp_path / "out", format, strict=True)
    assert not (tmp_path / "out" / "model-2-of-2.safetensors").exists()
    summary = quantize_checkpoint(folder, tmp_path / "out", format)
    with pytest.raises(StorageError, match=r"model\.layers\.1\.bad\.weight held NaN or Inf when an earlier run"):
        quantize_checkpoint(folder, tmp_path / "out", format, strict=True)
    again = quantize_checkpoint(folder, tmp_path / "out", format)
    assert len(again.reused) == 2
    assert [t.bad_blocks for t in again.quantized] == [t.bad_blocks for t in summary.quantized]
    strict = quantize_checkpoint(folder, tmp_path / "good", format, exclude=[*DEFAULT_EXCLUDE, "*bad*"], strict=True)
    assert not any(tensor.bad_blocks for tensor in strict.quantized)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_default_dtype_changes_nothing(folder, tmp_path, format):
    quantize_checkpoint(folder, tmp_path / "want", format)
    torch.set_default_dtype(torch.bfloat16)
    try:
        quantize_checkpoint(folder, tmp_path / "out", format)
    finally:
        torch.set_default_dtype(torch.float32)
    assert contents(tmp_path / "out") == contents(tmp_path / "want")


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model-2-of-2.safetensors").unlink(), r"shards .* missing: model-2-of-2\.safetensors"),
        (lambda f: os.truncate(f / "model-2-of-2.safetensors", 9000), "truncated"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "found consolidated.*, model-1.*, model-2"),
        (lambda f: (f / "b.safetensors.index.json").write_text("{}"), "more than one index"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json: need a JSON object"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "not an index of shards"),
        (lambda f: edit_index(f, lambda c: c["weight_map"].update(x=3)), "3 is not a plain file name"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: need a JSON object, found a list"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), r"config\.json: not valid JSON"),
        (lambda f: (f / "config.json").write_text('{"quantization_config": "int4"}'), "quantized already, by 'int4'"),
        (lambda f: edit_index(f, lambda c: c["weight_map"].update(x="../x.safetensors")), "not a plain file name"),
        (lambda f: edit_index(f, lambda c: c["weight_map"].update(x="model-1-of-2.safetensors")), "in their shards: x"),
        (
            lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}'),
            "quantized already, by 'fp8'",
        ),
    ],
)
def test_damaged_sources(folder, tmp_path, damage, message):
    damage(folder)
    with pytest.raises(StorageError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


def test_a_nibblas_file_is_not_quantized_again(tmp_path):
    save_file(weights(), tmp_path / "a")
    quantize_checkpoint(tmp_path / "a", tmp_path / "b", "nvfp4")
    with pytest.raises(StorageError, match="quantized already, by nibblas"):
        quantize_checkpoint(tmp_path / "b", tmp_path / "c", "nvfp4")


def test_two_processes_do_not_write_one_file(folder, tmp_path):
    def again(*call):
        with pytest.raises(StorageError, match=r"another process is writing .*\.partial"):
            quantize_checkpoint(folder, tmp_path / "out", "nvfp4")

    quantize_checkpoint(folder, tmp_path / "out", "nvfp4", progress=again)
    assert len(load_folder(tmp_path / "out")) == len(weights())


def run(code, *args, **kwargs):
    # One thread and no reuse of freed pieces: the peak is then the same from run to run.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, **kwargs)


QUANTIZE = """
    import sys
    from nibblas.checkpoint.stream import quantize_checkpoint
    quantize_checkpoint(sys.argv[1], sys.argv[2], "nvfp4")
"""


def test_a_full_disk_leaves_only_a_partial(folder, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    out = tmp_path / "out"
    result = run(QUANTIZE, folder, out, preexec_fn=limit)
    assert result.returncode != 0
    assert "File too large" in result.stderr
    assert [path.name for path in out.iterdir()] == ["model-1-of-2.safetensors.partial"]
    quantize_checkpoint(folder, out, "nvfp4")
    quantize_checkpoint(folder, tmp_path / "want", "nvfp4")
    assert contents(out) == contents(tmp_path / "want")


def test_a_killed_process(folder, tmp_path):
    code = """
        import os, signal, sys
        from nibblas.checkpoint.stream import quantize_checkpoint
        def progress(done, total, name):
            if "wide" in name:
                os.kill(os.getpid(), signal.SIGKILL)
        quantize_checkpoint(sys.argv[1], sys.argv[2], "mxfp4", progress=progress)
    """
    out = tmp_path / "out"
    assert run(code, folder, out).returncode == -9
    assert {path.name for path in out.iterdir()} == {"model-1-of-2.safetensors", "model-2-of-2.safetensors.partial"}
    assert quantize_checkpoint(folder, out, "mxfp4").reused == ("model-1-of-2.safetensors",)
    quantize_checkpoint(folder, tmp_path / "want", "mxfp4")
    assert contents(out) == contents(tmp_path / "want")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("batch", [(), (8,)], ids=["2-D", "experts"])
def test_memory_does_not_grow_with_the_tensor(tmp_path, batch):
    code = """
        import re, sys
        from nibblas.checkpoint import stream
        stream.CHUNK_BYTES = 1 << 20
        stream.quantize_checkpoint(sys.argv[1], sys.argv[2], "nvfp4")
        print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
    """
    peaks = []
    for mebibytes in (8, 32):
        path = tmp_path / f"{mebibytes}.safetensors"
        shape = (*batch, (mebibytes << 20) // 2048 // (8 if batch else 1), 1024)
        header = {"expert.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, mebibytes << 20]}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + (mebibytes << 20))
        result = run(code, path, tmp_path / "out.safetensors")
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout) << 10)
        (tmp_path / "out.safetensors").unlink()
    assert peaks[1] - peaks[0] < 4 << 20, peaks
