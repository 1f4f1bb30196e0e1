"""The report on the real model, on a small causal one, and on what holds no model."""

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nibblas.bench import probe, timing
from nibblas.bench import report as module
from nibblas.bench.report import print_report, report
from nibblas.roofline import Roofline

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# The relative MSE that all-MiniLM-L6-v2's 36 linear layers may have, by format and scale rule.
TARGETS = {("nvfp4", "absmax"): 0.0090, ("nvfp4", "search"): 0.0067, ("mxfp4", "even"): 0.0131}


@pytest.fixture(autouse=True)
def quick(quick_report):
    """No test here waits for a long timing."""


@pytest.fixture(scope="module")
def quick_report():
    line = Roofline("a test", "cpu", 1, 10e9, {"fp32": 80e9, "bf16": 160e9}, "measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "measure", lambda device, threads: line)
        patch.setattr(module, "SECONDS", 0.0)
        patch.setattr(module, "cold_bytes", lambda device: 2**20)
        yield


@pytest.fixture(scope="module")
def minilm(quick_report):
    seen = []
    found = report(threads=1, device=timing.CPU, progress=lambda *step: seen.append(step))
    return found, seen


def text_of(found):
    console = Console(file=io.StringIO(), width=100)
    print_report(found, console)
    return console.file.getvalue()


def test_weight_errors_of_minilm(minilm):
    found, _ = minilm
    errors = {(row.format, row.scale_rule): row.relative_mse for row in found.accuracy}
    assert set(errors) == {
        *(("nvfp4", rule) for rule in ("absmax", "four_over_six", "search")),
        *(("mxfp4", rule) for rule in ("even", "floor", "rceil", "search")),
    }
    for rule, target in TARGETS.items():
        assert 0.9 * target < errors[rule] <= target
    for row in found.accuracy:
        assert errors[row.format, "search"] <= row.relative_mse <= row.worst_relative_mse < 0.02
        assert row.worst_layer.startswith("encoder.layer.")


def test_embeddings_of_minilm(minilm):
    found, _ = minilm
    assert (found.outputs, found.architecture, found.sentences) == ("sentence embeddings", "BertModel", 16)
    for row in found.accuracy:
        for cosine in (row.cosine, row.cosine_fp4_activations):
            assert 0.7 < cosine.min < cosine.mean < 0.999
        assert row.cosine_fp4_activations.mean < row.cosine.mean
        assert row.cosine.mean > 0.95
    best = {row.format: row.cosine.mean for row in found.accuracy if row.scale_rule == "search"}
    assert best["nvfp4"] > best["mxfp4"]


def test_sizes_of_minilm(minilm):
    found, _ = minilm
    elements = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert (found.layers, found.elements) == (36, elements)
    assert [(layer.name, layer.reason) for layer in found.left] == [("pooler.dense", "excluded by '*pooler*'")]
    assert found.nbytes == {
        "fp32": 4 * elements,
        "bf16": 2 * elements,
        "nvfp4": elements // 2 + elements // 16 + 36 * 4,
        "mxfp4": elements // 2 + elements // 32,
    }


def test_times_of_minilm(minilm):
    found, _ = minilm
    cells = {(time.format, time.N, time.K, time.M, time.threads): time for time in found.times}
    shapes = {(384, 384): 24, (384, 1536): 6, (1536, 384): 6}
    assert set(cells) == {
        (format, *shape, M, 1) for format in ("nvfp4", "mxfp4") for shape in shapes for M in (1, found.tokens)
    }
    for time in found.times:
        assert time.layers == shapes[time.N, time.K]
        assert time.seconds > 0
        assert time.floor >= time.N * time.K / 2 / 10e9
        assert time.share_of_floor == time.floor / time.seconds
        assert f"M={time.M} N={time.N} K={time.K} bf16 x {time.format} -> bf16 +bias" in time.explanation
        assert set(time.torch_seconds) == set(time.speedups) == {"torch fp32", "torch bf16"}
        for name, ratio in time.speedups.items():
            assert ratio.low <= ratio.value <= ratio.high
            assert 0.2 < ratio.value * time.seconds / time.torch_seconds[name] < 5


def test_the_report_as_data_and_as_tables(minilm):
    found, seen = minilm
    data = json.loads(json.dumps(found.as_dict()))
    assert data["accuracy"][0]["cosine"]["mean"] == found.accuracy[0].cosine.mean
    assert data["times"][0]["share_of_floor"] == found.times[0].share_of_floor
    assert data["left"] == [{"name": "pooler.dense", "reason": "excluded by '*pooler*'"}]
    text = text_of(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text  # nothing was cut off
    for words in ("all-MiniLM-L6-v2", "four_over_six", f"{found.accuracy[0].relative_mse:.5f}", "24 x (384 x 384)"):
        assert words in text
    assert found.times[0].kernel in text
    steps = [done for done, _, _ in seen]
    (total,) = {total for _, total, _ in seen}
    assert steps == sorted(steps)
    assert steps[0] == 0 < steps[-1] < total
    assert max(after - before for before, after in pairwise(steps)) < total / 10
    assert all(words for _, _, words in seen)
    assert any("mxfp4 rceil: encoder.layer.5" in words for _, _, words in seen)


def test_no_floor_is_named_where_none_was_measured(monkeypatch):
    assumed = Roofline("a test", "cpu", 1, 10e9, {"fp32": 80e9, "bf16": 160e9}, "assumed")
    monkeypatch.setattr(probe, "measure", lambda device, threads: assumed)
    linear = torch.nn.Linear(32, 16)
    layers = module.conversion_report(module.convert(torch.nn.Sequential(linear)))
    times = module._times(torch.nn.Sequential(torch.nn.Linear(32, 16)), list(layers), 1, 1, timing.CPU, lambda *_: None)
    assert [(time.format, time.M, time.floor, time.share_of_floor) for time in times] == [
        ("nvfp4", 1, None, None),
        ("mxfp4", 1, None, None),
    ]


def causal_model(folder: Path, hidden=64) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(["[UNK]", "</s>", "the", "cat", "sat", "on", "mat", "."])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="</s>")
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_causal_model_by_its_safetensors_file(tmp_path):
    path = causal_model(tmp_path) / "model.safetensors"
    found = report(path, threads=1, device=timing.CPU, sentences=["the cat sat on the mat .", "the mat"])
    assert (found.outputs, found.layers, found.tokens) == ("last hidden states", 7, 14)
    for row in found.accuracy:
        assert 0.9 < row.cosine.min <= row.cosine.mean < 1
    assert str(path) in text_of(found)


def test_what_holds_no_model_is_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"report: .*nowhere does not exist"):
        report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no model that transformers can load: it has no config\.json"):
        report(tmp_path)
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(ValueError, match=r"one\.safetensors is no model .*: beside it is no config\.json"):
        report(tmp_path / "one.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"report: transformers can't load .*: \S"):
        report(tmp_path)
    with pytest.raises(ValueError, match="no sentences given"):
        report(sentences=())
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'nibblas\[report\]'"):
        report()


def test_a_truncated_model_is_refused(tmp_path):
    weights = causal_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="report: transformers can't load"):
        report(tmp_path, device=timing.CPU)


def test_a_model_with_nothing_to_convert_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no linear layer that can be converted to mxfp4"):
        report(causal_model(tmp_path, hidden=24), threads=1, device=timing.CPU)
