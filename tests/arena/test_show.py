"""What a record looks like in a terminal and as a page, whatever a submission has written into it."""

import io
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from arena_records import BAD, GOOD, SIZES, timed, untimed
from rich.console import Console
from typer.testing import CliRunner

from nibblas.arena.commands import app
from nibblas.arena.page import page
from nibblas.arena.record import ClocksSeen, Errors, PairedRatio, Sample, Statistics, Traced
from nibblas.arena.show import (
    clean,
    comparison_in_words,
    error_in_words,
    histogram,
    main_errors,
    ns_text,
    print_record,
    shared_values,
    short_text,
    span_in_words,
)
from nibblas.terminal import console_of_stdout

CHROMIUM = shutil.which("chromium")


def shown(record, width=100):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_record(record, console)
    return console.file.getvalue()


def line_with(text, found):
    return next(line for line in found.splitlines() if re.search(text, line))


def test_what_a_reader_looks_for():
    found = shown(GOOD)
    assert found.startswith("nvfp4_gemv, submission.py: correct here\nscore 24.35 us, geometric mean of the cases\n")
    assert "leaderboard on NVIDIA H200, 2026-12-01T10:00:00+00:00" in found
    assert "stood in for what this machine lacks: torch._scaled_mm with FP4" in found
    median = ns_text(GOOD.cases[2].statistics.median_ns)
    row = line_with(r"16384.*correct", found)
    assert re.search(rf"correct +0\.5 +4\.9e-04 +{median} +[\d.]+ - [\d.]+ us +6\d% +40", row)
    assert "Not counted: 2 (warm-up), 2 (the clocks were throttled)." in found
    assert "data[0]: only 4 of 16 codes in low nibbles (0123), 1 of 16 codes in high nibbles (0)" in found
    assert "user, network; not ipc: Operation not permitted" in found
    assert "kernelguard calls it valid (submission.py)" in found


def test_a_bad_run_tells_why():
    found = shown(BAD)
    assert re.search(r"m: 1 +0\.800 +0\.790 - 0\.810 +0\.990 - 1\.010 +1\.25 times as fast", found)
    assert re.search(r"k: 256.* wrong +3 NaN or inf", found)
    assert "  second line" in found
    assert "The calls went through a stand-in: the time is not the submission's own." in found
    assert "needs sm_100" in found


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_keep_to_the_terminal(width):
    for record in (GOOD, BAD):
        assert max(map(len, shown(record, width).splitlines())) <= width


def test_nothing_that_a_submission_wrote_moves_the_cursor_or_is_markup():
    found = shown(BAD)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", found)
    assert "[bold]x[/bold] <script>alert(1)</script>" in found


def test_clean():
    assert clean("a\tb\r\nc\x1b]0;title\x07\udc80\u2066") == "a    b\nc\ufffd]0;title\ufffd\ufffd\ufffd"
    assert clean("x" * 30, 10) == "xxxxxxx..."


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0.4, "0.4000 ns"),
        (999.94, "999.9 ns"),
        (999.96, "1.000 us"),
        (12_346, "12.35 us"),
        (9_999_600, "10.00 ms"),
        (99_996_000, "100.0 ms"),
        (1e9, "1.000 s"),
        (1.2e12, "1200 s"),
    ],
)
def test_times_in_nanoseconds(ns, words):
    assert ns_text(ns) == words


def test_spans_share_a_unit_where_they_can():
    assert span_in_words(24_430, 24_630) == "24.43 - 24.63 us"
    assert span_in_words(990, 1010) == "990.0 ns - 1.010 us"


def test_a_histogram_counts_every_sample():
    bars, low, high = histogram([10.0] * 8 + [11.0] * 4 + [14.0], bins=4)
    assert (bars, low, high) == ("█▄ ▁", 10.0, 14.0)
    assert histogram([5.0], bins=3)[0] == "█  "


def test_one_slow_sample_does_not_flatten_the_rest():
    values = [10.0 + i / 10 for i in range(10)] + [1000.0]
    bars, low, high = histogram(values, bins=10)
    assert (low, high < 15) == (10.0, True)
    assert bars[-1] != " "


def test_values_that_cases_share_are_told_once():
    cases = [timed(values=values) for values in SIZES]
    assert shared_values(cases) == ["seed: 7"]
    assert short_text(cases[0], ["seed: 7"]) == "m: 7168; k: 16384; l: 1"
    assert shared_values(cases[:1]) == []
    same = [untimed(256), untimed(256)]
    assert short_text(same[0], shared_values(same)) == same[0].text


def test_errors_in_words():
    exact, rounded = (
        Errors("result", kind, "t", 8, 2.0, 1.0, 0.1, 10.0, (0,), 1.0, 2.0) for kind in ("exact", "reference")
    )
    assert main_errors(untimed(1, errors=(rounded, exact))) == exact
    assert main_errors(untimed(1, errors=())) is None
    assert error_in_words(exact) == ("2", "1.0e-01")
    integers = replace(exact, max_ulp=None, max_relative_rms=None, max_absolute=3.0)
    assert error_in_words(integers) == ("", "3 absolute")
    assert error_in_words(replace(integers, max_absolute=0.0)) == ("", "0")
    assert error_in_words(replace(exact, special_mismatches=2)) == ("2 NaN or inf", "")


def test_a_ratio_is_only_told_from_noise_beyond_it():
    fast, slow, same = BAD.comparison.ratios
    assert comparison_in_words(fast) == "1.25 times as fast"
    assert comparison_in_words(slow) == "takes 1.25 times as long"
    assert comparison_in_words(same) == "no difference that can be told from noise"
    # Noise has no side: 0.93 against itself could have been 1.075.
    mirrored = PairedRatio("", 1.03, 1.01, 1.06, 0.92, 0.95, (), ())
    assert comparison_in_words(mirrored) == "no difference that can be told from noise"
    assert "noise" in comparison_in_words(replace(fast, high=1.001))
    assert "noise" in comparison_in_words(replace(fast, noise_low=0.7))


def test_a_real_record(arena, problem):
    directory = problem("vector_add")
    record = arena(directory, directory / "submission.py", mode="benchmark", budget=0.1)
    found = shown(record)
    assert found.startswith("vector_add, submission.py: correct here\n")
    for case in record.cases:
        assert ns_text(case.statistics.median_ns) in found
        assert ns_text(case.statistics.median_ns) in page(record)


# --- the page ------------------------------------------------------------------------------------------------------

VOID = {"meta", "rect", "line", "circle", "path"}


class Checked(HTMLParser):
    """Fails unless tags are balanced; keeps tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.texts, self.headings = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(record):
    found = Checked()
    found.feed(page(record))
    found.close()
    assert found.open == []
    return found


@pytest.mark.parametrize("record", [GOOD, BAD], ids=["good", "bad"])
def test_the_page_needs_nothing_else_and_runs_nothing(record):
    found = parsed(record)
    tags = {tag for tag, _ in found.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    names = {name for _, attrs in found.seen for name in attrs}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "href", "style"})
    assert "url(" not in page(record)
    page(record).encode("ascii")  # so that no encoding can spoil it


def test_a_page_and_json_are_two_wishes(tmp_path):
    done = CliRunner().invoke(app, ["show", "record.json", "--html", str(tmp_path / "page.html"), "--json"])
    assert done.exit_code == 2
    assert "--html and --json are given" in done.output


def test_what_goes_to_no_terminal_is_100_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console_of_stdout().width == 100


def test_the_page_says_what_the_terminal_says():
    text = "".join(parsed(GOOD).texts)
    for part in ("correct here", "24.35 us", "NVIDIA H200", "only 4 of 16 codes", "not ipc: Operation not permitted"):
        assert part in text
    assert "<script>alert(1)</script>" in "".join(parsed(BAD).texts)


def test_headings_have_no_gaps_and_plots_have_words():
    for record in (GOOD, BAD):
        found = parsed(record)
        assert found.headings[0] == 1
        assert all(b <= a + 1 for a, b in zip(found.headings, found.headings[1:], strict=False))
        plots = [attrs for tag, attrs in found.seen if tag == "svg"]
        assert len(plots) == sum(case.statistics is not None for case in record.cases)
        assert all("median" in attrs["aria-label"] for attrs in plots)


def test_every_sample_is_drawn_inside_the_plot():
    found = parsed(replace(GOOD, cases=(timed(n=30),)))
    marks = [attrs for _, attrs in found.seen if attrs.get("class") in ("sample", "left-out", "throttled")]
    assert len(marks) == 32
    for attrs in marks:
        x, y = attrs.get("cx", attrs.get("x")), attrs.get("cy", attrs.get("y"))
        if x is not None:
            assert 60 <= float(x) <= 420
            assert 0 <= float(y) <= 220


@pytest.mark.parametrize(
    "times",
    [[100.0], [100.0, 100.0, 100.0], [1e-3, 1e9]],
    ids=["one", "all the same", "far apart"],
)
def test_odd_samples_can_be_drawn(times):
    samples = tuple(Sample({"event": ns}, ns) for ns in times)
    case = replace(timed(), samples=samples, statistics=Statistics("event", times[0], times[0], times[-1], len(times)))
    record = replace(GOOD, cases=(case,))
    assert case.times == times
    assert "nan" not in page(record)
    assert ns_text(times[0]) in shown(record)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a program called chromium (Debian's package chromium)")
def test_the_page_fits_a_phone_and_axe_finds_nothing(tmp_path):
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for record, scheme in ((GOOD, "light"), (BAD, "dark")):
            path = tmp_path / f"{scheme}.html"
            path.write_text(page(record))
            tab = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
            tab.goto(path.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390
            assert [violation["id"] for violation in Axe().run(tab).response["violations"]] == []
        browser.close()


def test_what_a_profiler_saw_is_shown_beside_the_events():
    *others, last = GOOD.cases
    seen = replace(last, traced=Traced(8, 21e3, 17.5e3, 24e3))
    text = " ".join(shown(replace(GOOD, cases=(*others, seen)), width=400).split())
    assert "8 kernels, copies and fills in 21.00 us, 17.50 us of them at work; 24.00 us by events" in text
    blind = replace(last, traced=Traced(why_not="the profiler saw no kernels"))
    assert "the profiler saw no kernels" in shown(replace(GOOD, cases=(*others, blind)))


def test_clocks_are_shown_where_they_were_read():
    line = "l: 1: SM clock 1200 - 1980 MHz while sampled (HW thermal slowdown, idle)."
    unsampled = timed(samples=(), statistics=None, clocks=ClocksSeen(1200, 1980, ("HW thermal slowdown", "idle")))
    record = replace(GOOD, cases=(unsampled, timed(values=SIZES[1])))
    for text in (shown(record, width=200), "".join(parsed(record).texts)):
        assert line in text
        assert text.count("SM clock") == 1
    steady = replace(record, cases=(timed(clocks=ClocksSeen(1980, 1980)),))
    assert "SM clock 1980 MHz while sampled." in shown(steady, width=200)
