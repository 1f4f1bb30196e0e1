"""The command line. Beside the package itself only typer and rich are imported before a command runs."""

import json
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from nibblas.arena.commands import app as arena_app
from nibblas.index.commands import app as index_app
from nibblas.terminal import AsJson, console_of_stdout, print_json, progress, refuse, table_of
from nibblas.words import counted, time_text

if TYPE_CHECKING:
    import torch

    from nibblas.checkpoint.inspect import Report
    from nibblas.checkpoint.stream import Summary
    from nibblas.dispatch import Candidate, Explanation
    from nibblas.formats import Format
    from nibblas.kernel import Kernel
    from nibblas.problem import Problem

MAX_WIDTH = 100

app = typer.Typer(
    name="nibblas",
    help="Matrix multiplication for 4-bit block-scaled floats (NVFP4, MXFP4) in PyTorch.\n\n"
    "Start with `nibblas doctor`, which tells what runs on this machine, and `nibblas report`, which "
    "shows on a real model what 4-bit weights save and cost.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)

app.add_typer(arena_app, name="arena")
app.add_typer(index_app, name="index")

Product = Annotated[Literal["linear", "grouped_linear", "gated_linear"], typer.Option(help="The operation to measure.")]
Batch = Annotated[int, typer.Option("--L", min=1, help="Matrices in a batch, of linear.")]
Groups = Annotated[
    int | None, typer.Option("--G", min=1, help="Groups, of grouped_linear, to which rows are dealt at random; 8.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own number by default.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 ...")]


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    warnings.showwarning = _show_warning
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C.

    An error is one line on stderr; with --debug, anywhere among the arguments, it is a traceback.
    """
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        try:
            app(arguments, prog_name="nibblas")
        finally:
            sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What reads our output has had enough. Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        _complain("[bold red]error:[/]", _in_words(error))
        return 1
    return 0


def _complain(kind: str, text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"{kind} {escape(text)}", highlight=False)


def _show_warning(message: Warning | str, *_, **__) -> None:
    _complain("[bold yellow]warning:[/]", " ".join(str(message).split()))


def _in_words(error: Exception) -> str:
    """The message of an error that is meant for people; the type as well where it wasn't."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}"
    text = " ".join(str(error).split())
    if text and isinstance(error, ValueError | TypeError | RuntimeError | ImportError | OSError):
        return text
    return f"{type(error).__name__}: {text} (a fault of nibblas: --debug shows where)"


def _version(wanted: bool) -> None:
    if wanted:
        from nibblas import __version__

        print(f"nibblas {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass  # `run` takes --debug itself, wherever it stands


def _format(name: str, others: str = "") -> "Format":
    from nibblas.formats import FORMATS

    if name.lower() not in FORMATS:
        raise typer.BadParameter(f"{name!r} is unknown; there are {others}{', '.join(FORMATS)}")
    return FORMATS[name.lower()]


def _sizes(text: str, letters: str) -> tuple[int, ...]:
    """ "4096x1024" -> (4096, 1024), one number for each letter."""
    parts = text.lower().split("x")
    if len(parts) != len(letters) or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: need {'x'.join(letters)}, such as {'x'.join(['4096'] * len(letters))}")
    return tuple(int(part) for part in parts)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _some(name: str, text: str) -> list[str]:
    """What the option or argument `name` lists; wrong usage where that is nothing."""
    if parts := _split(text):
        return parts
    raise typer.BadParameter(f"{name} is {text!r}, need one or more, with commas between them")


# --- commands ------------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    threads: Threads = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure the devices again; otherwise once is enough.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what this machine has: devices and their speed, compilers, which kernels run and why the others don't.

    The first call takes some seconds: it measures memory bandwidth and arithmetic rates, from which `nibblas explain`
    and `nibblas bench` name the least time that a product can take. They are kept.

    Examples:

    - `nibblas doctor`
    """
    from nibblas.bench.doctor import diagnose, print_diagnosis

    with progress("measuring") as advance:
        found = diagnose(threads, again, progress=lambda device: advance(0, 0, device))
    if as_json:
        print_json(found.as_dict())
    else:
        print_diagnosis(found, console_of_stdout(MAX_WIDTH))


@app.command()
def report(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="A model's folder or safetensors file; all-MiniLM-L6-v2 by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or cuda:1 ...; a GPU by default if there is one.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show on a real model what NVFP4 and MXFP4 weights save, cost, and how fast they are here.

    Converts the model's linear layers, runs sentences through it, and compares with the model as it was: bytes, weight
    error, cosine of the embeddings, time of the layers against torch, and which kernel ran and why.

    Examples:

    - `nibblas report`
    - `nibblas report path/to/model --json`
    """
    from nibblas.bench.report import print_report
    from nibblas.bench.report import report as make
    from nibblas.roofline import device_called

    place = device_called(device)
    refuse(context, f"{place} has no", threads=place.type != "cpu")
    with progress("report") as advance:
        found = make(path, threads=threads, device=place, progress=advance)
    if as_json:
        print_json(found.as_dict())
    else:
        print_report(found, console_of_stdout(MAX_WIDTH))


@app.command()
def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A safetensors file, or a folder with one or with shards.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file, or the folder, to make.")],
    format: Annotated[str, typer.Option(help="nvfp4 or mxfp4.")] = "nvfp4",
    scale_rule: Annotated[
        str | None,
        typer.Option(
            help="How block scales are found. nvfp4: absmax (default), four_over_six, search (least error, slow). "
            "mxfp4: even (default), floor, rceil, search."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Names to quantize, such as `'*.weight'` (the default); `'.*_proj'`, with a dot first, is of the last "
            "piece of a layer's name. Can be repeated."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Names to leave as they are, beside embeddings, norms, heads, poolers and routers "
            "(`nb.nn.DEFAULT_EXCLUDE`; `--no-default-exclude` drops those). Wins over `--include`. Can be repeated."
        ),
    ] = None,
    no_default_exclude: Annotated[
        bool, typer.Option("--no-default-exclude", help="Leave only what --exclude names.")
    ] = False,
    rotation: Annotated[int, typer.Option(help="Rotate blocks of this size first: 16, 32, 64 or 128.")] = 0,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Write all of OUT anew, in place of files that are there, and remove other weights of an earlier run. "
            "Without it no file is replaced: one that differs from what would be written is an error.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse weights with NaN or Inf; otherwise their blocks become NaN.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize the weights of a checkpoint to 4 bits, in memory that does not grow with it.

    All other tensors are copied. A run that was stopped goes on where it was when called again with the same options.

    Weights must be (N, K), as nn.Linear has them. GPT-2 and its kin store (K, N) and are refused (by the model_type in
    config.json).

    Examples:

    - `nibblas quantize model.safetensors model-fp4.safetensors`
    - `nibblas quantize llama/ llama-mxfp4/ --format mxfp4 --exclude '*layers.0.*'`
    """
    from dataclasses import asdict

    from nibblas.checkpoint.stream import quantize_checkpoint
    from nibblas.nn import DEFAULT_EXCLUDE

    with progress("quantize") as advance:
        summary = quantize_checkpoint(
            source,
            target,
            _format(format),
            scale_rule=scale_rule,
            include=include,
            exclude=(*(() if no_default_exclude else DEFAULT_EXCLUDE), *(exclude or ())),
            rotation=rotation,
            overwrite=overwrite,
            strict=strict,
            progress=advance,
        )
    for tensor in summary.quantized:
        if tensor.bad_blocks:
            blocks = counted(tensor.bad_blocks, "block")
            _show_warning(f"{tensor.name}: {blocks} held NaN or Inf and became NaN (--strict refuses)")
    if as_json:
        print_json(asdict(summary))
    else:
        _print_summary(summary, target, console_of_stdout(MAX_WIDTH))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file, or a folder of them.")],
    as_json: AsJson = False,
) -> None:
    """Tell what FP4 tensors a checkpoint holds, whoever wrote it, and what looks wrong with them.

    Knows the files of nibblas, ModelOpt, compressed-tensors, Quark, torchao, gpt-oss, MLX and others. Prints formats,
    shapes, layouts and the range of the scales; warns of NaN scales, suspicious global scales and missing parts.

    Examples:

    - `nibblas inspect model-fp4.safetensors`
    """
    from nibblas.checkpoint.inspect import inspect_file

    found = inspect_file(path)
    if as_json:
        print(found.to_json())
    else:
        _print_inspection(found, console_of_stdout(MAX_WIDTH))


@app.command()
def explain(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="linear, grouped_linear, gated_linear or quantize.")] = "linear",
    sizes: Annotated[
        str, typer.Argument(metavar="[MxNxK]", help="All sizes at once, such as 1x4096x4096; of quantize MxK.")
    ] = "",
    M: Annotated[int, typer.Option("--M", min=1, help="Rows of the activations.")] = 1,
    N: Annotated[int, typer.Option("--N", min=1, help="Rows of the weights.")] = 4096,
    K: Annotated[int, typer.Option("--K", min=1, help="What the product sums over.")] = 4096,
    L: Annotated[int, typer.Option("--L", min=1, help="Products in a batch, of linear.")] = 1,
    G: Annotated[int, typer.Option("--G", min=1, help="Groups, of grouped_linear.")] = 1,
    a: Annotated[str, typer.Option(help="Activations: bf16, fp16, fp32, or a format.")] = "bf16",
    b: Annotated[str, typer.Option(help="Weights: nvfp4 or mxfp4. Of quantize, the result.")] = "nvfp4",
    out: Annotated[str | None, typer.Option(help="Result: bf16 (default), fp16 or fp32; not of quantize.")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias.")] = False,
    rule: Annotated[str | None, typer.Option(help="Scale rule, of quantize.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="A row's result must not depend on M.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show which kernel would run, what each should take and on what evidence, and why the others can't.

    Each kernel is shown with the layouts of the weights that it takes. The exit status is 1 where none can run.

    Examples:

    - `nibblas explain linear 1x4096x4096`
    - `nibblas explain linear --M 64 --a nvfp4`
    """
    from nibblas.bench.timing import torch_threads
    from nibblas.problem import DTYPES, OPS, Problem, arch_of
    from nibblas.roofline import device_called

    if op not in OPS:
        raise typer.BadParameter(f"{op!r} is no operation; there are {', '.join(OPS)}")
    quantizes = op == "quantize"
    given = bool(sizes)
    refuse(context, f"sizes are given twice, as {sizes} and by", M=given, N=given, K=given)
    refuse(
        context,
        f"{op} has no",
        N=quantizes,
        L=op != "linear",
        G=op != "grouped_linear",
        out=quantizes,
        bias=quantizes,
        rule=not quantizes,
        batch_invariant=op != "linear",
    )
    if given and quantizes:
        M, K = _sizes(sizes, "MK")
    elif given:
        M, N, K = _sizes(sizes, "MNK")
    a, format = a.lower(), _format(b)
    format.check_K("explain", K)
    if a not in DTYPES:
        _format(a, f"{', '.join(DTYPES)}, ").check_K("explain", K)
    place = device_called(device)
    refuse(context, f"{place} has no", threads=place.type != "cpu")
    if quantizes:
        rule = rule or format.scale_rules[0]
        if rule not in format.scale_rules:
            raise typer.BadParameter(f"rule {rule!r} is unknown; {format} has {', '.join(format.scale_rules)}")
        problem = Problem(op, M, 0, K, a=a, b=format.name, out=format.name, rule=rule, arch=arch_of(place))
    else:
        out = (out or "bf16").lower()
        if out not in DTYPES:
            raise typer.BadParameter(f"out {out!r} is unknown; there are {', '.join(DTYPES)}")
        problem = Problem(
            op, M, N, K, L, G, a, format.name, out, bias=bias, batch_invariant=batch_invariant, arch=arch_of(place)
        )
    with torch_threads(threads):
        found = _explanations(problem, place)
    if as_json:
        print_json(_explanations_as_dict(found))
    else:
        _print_explanations(found, console_of_stdout(MAX_WIDTH))
    if not any(explanation.chosen for explanation in found):
        raise typer.Exit(1)


@app.command()
def bench(
    context: typer.Context,
    op: Annotated[
        Literal["linear", "grouped_linear", "gated_linear", "quantize"], typer.Option(help="What to time.")
    ] = "linear",
    shapes: Annotated[str, typer.Option(help="N x K of the weights, such as 4096x4096,1024x4096.")] = (
        "1024x1024,4096x4096"
    ),
    M: Annotated[str, typer.Option("--M", help="Rows of the activations, such as 1,4,16.")] = "1,4,16,64",
    L: Batch = 1,
    G: Groups = None,
    formats: Annotated[str, typer.Option(help="Formats of the weights.")] = "nvfp4,mxfp4",
    activations: Annotated[str, typer.Option(help="bf16, fp16, fp32, or fp4 (of the weights' format).")] = "bf16",
    kernels: Annotated[str, typer.Option(help="Kernels to time, by name; all by default.")] = "",
    peers: Annotated[str, typer.Option(help="Other libraries to time beside them: humming, cublas, gemlite.")] = "",
    random: Annotated[int, typer.Option(min=0, help="Instead of --shapes and --M: so many random problems.")] = 0,
    device: Device = "cpu",
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(min=5, help="Samples of each kernel on each problem.")] = 30,
    seconds: Annotated[float, typer.Option(min=0, help="Take no more samples of a problem after this time.")] = 1.0,
    dependent_launch: Annotated[
        bool, typer.Option(help="Launch kernels as nb.dependent_launch() lets them; torch's and peers' as ever.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Append the measurements to this JSONL file, not to this machine's evidence."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time every kernel that can run here against torch, interleaved and with cold caches, and keep the evidence.

    Each output is compared with a float64 oracle first; a kernel that is wrong is not timed. The dispatcher uses the
    measurements from then on. Takes about a minute.

    With `--op quantize`: every quantizer, by every scale rule, against a copy of its (N, K) input of the type that
    `--activations` names; one that differs from the reference by a byte is not timed.

    Examples:

    - `nibblas bench`
    - `nibblas bench --shapes 14336x4096 --M 1,8 --threads 1`
    """
    from nibblas import evidence
    from nibblas.bench.sweep import print_results, random_problems, sweep
    from nibblas.bench.sweep_quantize import sweep_quantize
    from nibblas.ops import dependent_launch as set_dependent_launch
    from nibblas.roofline import device_called

    quantizes, draws = op == "quantize", random > 0
    place = device_called(device)
    refuse(
        context,
        f"{op} has no",
        M=quantizes,
        L=op != "linear",
        G=op != "grouped_linear",
        peers=op != "linear",
        random=quantizes,
        dependent_launch=quantizes,
    )
    refuse(context, "--random takes the place of", shapes=draws, M=draws)
    refuse(context, f"{place} has no", threads=place.type != "cpu", dependent_launch=place.type == "cpu")
    matrices = [(N, K) for N, K in (_sizes(shape, "NK") for shape in _some("--shapes", shapes))]
    rows = [M for (M,) in (_sizes(rows, "M") for rows in _some("--M", M))]
    wanted = [_format(name) for name in _some("--formats", formats)]
    set_dependent_launch(dependent_launch)
    activations = activations.lower()
    results: list[Any] = []

    def keep(result: Any) -> None:
        results.append(result)
        if output and result.measurements:
            evidence.append(output, result.measurements)

    options: dict[str, Any] = {
        "device": place,
        "threads": threads,
        "names": _split(kernels) or None,
        "rounds": rounds,
        "seconds": seconds,
        "keep": keep,
    }
    written = output
    # A run that is stopped loses nothing: what was measured is written at once, or else to the store however this ends.
    try:
        with progress("bench") as advance:
            options["progress"] = advance
            if quantizes:
                sweep_quantize(matrices, wanted, activations, **options)
            else:
                options |= {"op": op, "L": L, "G": G, "peers": _split(peers)}
                for some, few in [([(N, K)], [few]) for N, K, few in random_problems(random)] or [(matrices, rows)]:
                    sweep(some, few, wanted, activations, **options)
    finally:
        measurements = [m for result in results for m in result.measurements]
        if not output and measurements:
            # Not before the end, since it changes the choices. None, and a warning, where it can't be written.
            written = evidence.store().add(measurements)
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        console = console_of_stdout(MAX_WIDTH)
        print_results(results, console)
        if written and measurements:
            console.print(
                f"{counted(len(measurements), 'measurement')} added to {escape(str(written))}",
                highlight=False,
                soft_wrap=True,
            )
    if not measurements and not any(result.wrong for result in results):
        reasons = {name: why for result in results for name, why in result.unable.items()}
        raise RuntimeError(f"no kernel was timed: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}")
    if any(result.wrong for result in results):
        raise typer.Exit(1)


@app.command()
def tune(
    context: typer.Context,
    shapes: Annotated[str, typer.Argument(help="N x K of the weights, such as 4096x4096,14336x4096.")],
    op: Product = "linear",
    M: Annotated[str, typer.Option("--M", help="Rows of the activations, such as 1,4,16.")] = "1,4,16,64",
    L: Batch = 1,
    G: Groups = None,
    formats: Annotated[str, typer.Option(help="Formats of the weights.")] = "nvfp4,mxfp4",
    activations: Annotated[str, typer.Option(help="bf16, fp16, fp32, or fp4 (of the weights' format).")] = "bf16",
    device: Device = "cpu",
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, about.")] = 60.0,
) -> None:
    """Measure your shapes here, so that kernels are chosen by evidence, and say which choices changed.

    A kernel replaces another only if it beats it by more than the noise. Wrong kernels are not timed.

    Examples:

    - `nibblas tune 4096x4096,14336x4096 --M 1,8`
    - `nibblas tune 2048x2048 --op grouped_linear --G 32`
    """
    from nibblas.bench.tune import print_tuned
    from nibblas.bench.tune import tune as run
    from nibblas.roofline import device_called

    place = device_called(device)
    refuse(context, f"{op} has no", L=op != "linear", G=op != "grouped_linear")
    refuse(context, f"{place} has no", threads=place.type != "cpu")
    with progress("tune") as advance:
        tuned = run(
            [(N, K) for N, K in (_sizes(shape, "NK") for shape in _some("SHAPES", shapes))],
            [rows for (rows,) in (_sizes(rows, "M") for rows in _some("--M", M))],
            [_format(name) for name in _some("--formats", formats)],
            activations.lower(),
            op=op,
            L=L,
            G=G,
            device=place,
            threads=threads,
            seconds=seconds,
            progress=advance,
        )
    print_tuned(tuned, console_of_stdout(MAX_WIDTH))


# --- what commands print -------------------------------------------------------------------------------------------


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count:,} B"


def _print_summary(summary: "Summary", target: Path, console: Console) -> None:
    errors = {t.name: t.relative_mse for t in summary.quantized if t.relative_mse is not None}
    rotated = f", rotated by {summary.rotation}" if summary.rotation else ""
    share = summary.bytes_after / summary.bytes_before if summary.bytes_before else 1
    print_ = partial(console.print, highlight=False)
    print_(
        f"[bold]{escape(str(target))}[/]: {summary.format}, scale rule {summary.scale_rule}{rotated}", soft_wrap=True
    )
    print_(f"  {_bytes(summary.bytes_before)} -> {_bytes(summary.bytes_after)} ({share:.0%})")
    print_(f"  {counted(len(summary.quantized), 'tensor')} quantized, {len(summary.skipped)} copied")
    if errors:
        worst = max(errors, key=errors.__getitem__)
        mean = sum(errors.values()) / len(errors)
        earlier = any(t.relative_mse is None and not t.bad_blocks for t in summary.quantized)
        of = f" of the {len(errors)} written now" if earlier else ""
        print_(f"  relative squared error{of} {mean:.5f} on average, {errors[worst]:.5f} at worst ({escape(worst)})")
    by_reason: dict[str, list[str]] = {}
    for tensor in summary.skipped:
        by_reason.setdefault(tensor.reason, []).append(tensor.name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        print_(f"  [dim]copied, {escape(reason)}: {escape(shown)}[/]")
    if summary.reused:
        print_(f"  finished by an earlier run: {escape(', '.join(summary.reused))}")
    if summary.left_out:
        print_(f"  [yellow]not copied:[/] {escape(', '.join(summary.left_out))}")


def _print_inspection(found: "Report", console: Console) -> None:
    print_ = partial(console.print, highlight=False)
    files = f" ({len(found.files)} files)" if len(found.files) > 1 else ""
    print_(f"[bold]{escape(found.path)}[/]{files}", soft_wrap=True)
    if found.tensors:
        writers = sorted({tensor.layout for tensor in found.tensors})
        print_(f"  {counted(len(found.tensors), 'FP4 tensor')}, stored as by {', '.join(writers)}")
        table = table_of("tensor", "format", "shape", "block scales", "global scale", right=("shape",))
        for tensor in found.tensors:
            scale = tensor.scale
            spread = f"{scale.min:.3g} to {scale.max:.3g}" if scale and scale.min is not None else ""
            layouts = dict.fromkeys(name for name in (tensor.scale_layout, tensor.data_layout) if name)
            table.add_row(
                f"{escape(tensor.name)}{' [yellow](!)[/]' * bool(tensor.warnings)}",
                " ".join([tensor.format or "?", *(name for name in layouts if name != "LINEAR")]),
                "x".join(map(str, tensor.shape)),
                spread,
                "" if tensor.global_scale is None else _few(tensor.global_scale),
            )
        print_(table)
    else:
        print_("  no FP4 tensors")
    for dtype, count in found.others.items():
        print_(f"  {counted(count.tensors, 'other tensor')} of {dtype}, {_bytes(count.nbytes)}")
    for warning in found.all_warnings:
        print_(f"[yellow]warning:[/] {escape(warning)}")


def _few(values: Sequence[float]) -> str:
    """One number, or the range of several."""
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _explanations(problem: "Problem", device: "torch.device") -> list["Explanation"]:
    """The problem explained for weights in LINEAR layouts, then in those that kernels of its operation like best."""
    from dataclasses import replace

    from nibblas.dispatch import explain_problem
    from nibblas.kernel import storage_layouts
    from nibblas.kernels import kernels

    stored = storage_layouts(kernel for kernel in kernels() if kernel.op == problem.op)
    pairs = dict.fromkeys([problem.b_layouts, *((scale.name, data.name) for scale, data in stored)])
    return [explain_problem(replace(problem, b_layouts=pair), device) for pair in pairs]


def _rows(found: Sequence["Explanation"]) -> list[tuple["Problem", "Candidate"]]:
    """Each kernel where it can run, the fastest first; then those that can't, once each, with the reason."""
    can, cannot = [], {}
    for explanation in found:
        for candidate in explanation.candidates:
            if candidate.why_not is None:
                # A kernel that takes every layout says nothing new after the first.
                if explanation is found[0] or candidate.kernel.b_layouts is not None:
                    can.append((explanation.problem, candidate))
            elif candidate.kernel.name not in cannot or _likes(candidate.kernel, explanation.problem):
                cannot[candidate.kernel.name] = explanation.problem, candidate
    runs = {candidate.kernel.name for _, candidate in can}
    can.sort(key=lambda row: (row[1].seconds, not _likes(row[1].kernel, row[0]), row[1].kernel.name))
    return can + [row for name, row in cannot.items() if name not in runs]


def _likes(kernel: "Kernel", problem: "Problem") -> bool:
    return kernel.b_layouts is not None and problem.b_layouts == tuple(l.name for l in kernel.b_layouts[0])


def _explanations_as_dict(found: Sequence["Explanation"]) -> dict:
    first = found[0]
    return {
        "problem": first.problem.as_dict(),
        "floor": first.floor,
        "floor_source": first.floor_source,
        "kernels": [
            {
                "kernel": candidate.kernel.name,
                "index": candidate.kernel.slug,
                "b_layouts": problem.b_layouts,
                "why_not": candidate.why_not,
                "seconds": candidate.seconds if candidate.why_not is None else None,
                "basis": candidate.basis,
                "record": json.loads(candidate.record.to_json()) if candidate.record else None,
                "distance": candidate.distance,
            }
            for problem, candidate in _rows(found)
        ],
    }


def _print_explanations(found: Sequence["Explanation"], console: Console) -> None:
    from nibblas.dispatch import NONE_CAN

    first, rows = found[0], _rows(found)
    print_ = partial(console.print, highlight=False)
    print_(f"[bold]{first.problem}[/]")
    print_(first.floor_in_words)
    layouts = ["weights in"] if first.problem.op != "quantize" else []
    table = table_of("kernel", *layouts, "time", "of floor", "why", right=("time", "of floor"))
    unable: list[str] = []
    for i, (problem, candidate) in enumerate(rows):
        kernel = candidate.kernel
        if candidate.why_not is not None:
            unable.append(f"[dim]{escape(candidate.refusal)}[/]")
            continue
        table.add_row(
            f"[bold]> {kernel.name}[/]" if i == 0 else f"  {kernel.name}",
            *(
                "any layout" if kernel.b_layouts is None else "/".join(dict.fromkeys(problem.b_layouts))
                for _ in layouts
            ),
            time_text(candidate.seconds),
            first.share(candidate),
            candidate.basis_in_words,
        )
    if len(rows) > len(unable):
        print_(table)
        show = f"`nibblas index show {rows[0][1].kernel.slug}`"
        print_(f"[dim]{show} tells more of the first, after `nibblas index add --own`[/]")
    else:
        print_(f"[red]{NONE_CAN}[/]")
    for line in unable:
        print_(line)


if __name__ == "__main__":
    main()
