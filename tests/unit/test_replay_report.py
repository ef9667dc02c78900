"""Evaluations and how they are shown: rows, JSON, and a page that stands alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tutti_core.errors import ConfigError, InternalError
from tutti_core.policies.choice import DEFAULT, POLICIES
from tutti_core.replay import evaluate as module
from tutti_core.replay.bounds import clairvoyant, hit_rate, unlimited
from tutti_core.replay.evaluate import Evaluation, Plan, evaluate
from tutti_core.replay.generate import generate, preset
from tutti_core.replay.mooncake import Problem, ReadTrace
from tutti_core.replay.page import html_page
from tutti_core.replay.report import Report, tables, trace_facts
from tutti_core.replay.simulate import Bin, Outcome, simulate
from tutti_core.replay.trace import Trace

MALICE = "<script>alert('x')</script>\"&[bold]</style>"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(preset("chat"), 30, 2, "chat")


def fake(
    trace: Trace,
    policy: str,
    capacity_pages: int,
    dram_pages: int,
    seed: int,
    on_progress: Callable[[int, int], None] | None,
) -> Outcome:
    """A driver that hits a tenth of the blocks, half of them in DRAM, for every policy but LRU."""
    hits = 0 if policy == "lru" else len(trace.ids) // 10
    if on_progress:
        on_progress(1, 2)
    bins = [Bin(0.0, dram_pages, hits, 5), Bin(1.0, 0, 0, 0), Bin(2.0, 0, 1, 1)]
    return Outcome(hits, hits * trace.block_tokens, hits // 2, seed, bins)


def reported(trace: Trace, plan: Plan, evaluation: Evaluation) -> Report:
    return Report.of(plan, [(trace_facts(ReadTrace(trace), plan), evaluation)])


# ---- plans ----
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"policies": ("lur",)}, "did you mean 'lru'"),
        ({"policies": ()}, "nothing to try"),
        ({"capacity_pct": ()}, "nothing to try"),
        ({"capacity_pct": (0.0,)}, "capacity_pct = 0 "),
        ({"capacity_pct": (5.0, -1.0)}, "capacity_pct = -1 "),
        ({"capacity_pct": (100.1,)}, "capacity_pct = 100.1 "),
        ({"capacity_pct": (math.nan,)}, "capacity_pct = nan "),
        ({"capacity_pct": (math.inf,)}, "capacity_pct = inf "),
        ({"capacity_pages": (0,)}, "capacity_pages = 0 "),
        ({"dram_pct": -1.0}, "dram_pct = -1 "),
        ({"dram_pct": 101.0}, "dram_pct = 101 "),
        ({"dram_pct": math.nan}, "dram_pct = nan "),
        ({"page_bytes": 0}, "page_bytes = 0 "),
        ({"jobs": 0}, "jobs = 0 "),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Plan(**change)  # type: ignore[arg-type]


def test_capacities_must_fit_the_trace(trace: Trace) -> None:
    unique = len(trace.unique_ids)
    with pytest.raises(ConfigError, match="comes to no page"):
        Plan(capacity_pct=(1e-6,)).capacities(trace)
    with pytest.raises(ConfigError, match="above 100 %"):
        Plan(capacity_pages=(unique + 1,)).capacities(trace)
    both = Plan(capacity_pct=(100, 50), capacity_pages=(7, unique))
    assert both.capacities(trace) == [
        (7, round(700 / unique, 3)),
        (round(unique / 2), 50),
        (unique, 100),
    ]


# ---- rows ----
def test_rows_compare_each_policy_with_lru_and_the_bounds(trace: Trace) -> None:
    plan = Plan(policies=("lru", "lru2"), capacity_pct=(10.0,), dram_pct=50.0, seed=9)
    found = evaluate(trace, plan, driver=fake)
    lru, other = found.rows
    pages = round(len(trace.unique_ids) / 10)
    best = hit_rate(trace, clairvoyant(trace, pages))
    assert (lru.policy, lru.hit_rate, lru.gap_closed) == ("lru", 0, 0)
    assert (other.policy, other.capacity_pages) == ("lru2", pages)
    assert other.hit_rate == pytest.approx(0.1, rel=0.01)
    assert other.hit_rate_dram + other.hit_rate_nvme == pytest.approx(other.hit_rate)
    assert other.clairvoyant == best
    assert other.unlimited == hit_rate(trace, unlimited(trace))
    assert other.gap_closed == pytest.approx(other.hit_rate / best)
    assert other.bytes_written == 9 * module.KV_BYTES_PER_TOKEN * trace.block_tokens
    assert replace(plan, page_bytes=10).bytes_of_page(trace) == 10
    assert found.timelines[0].bins[0].dram == plan.dram_pages(pages)


def test_lru_is_measured_though_no_one_asked_for_it(trace: Trace) -> None:
    plan = Plan(policies=("lru2",), capacity_pct=(10.0,))
    (row,) = evaluate(trace, plan).rows
    assert row.policy == "lru2"
    assert row.lru == simulate(trace, "lru", row.capacity_pages).hits_blocks / len(trace.ids)


def test_a_gap_that_is_none_has_no_share_closed(trace: Trace) -> None:
    (row,) = evaluate(trace, Plan(policies=("lru",), capacity_pct=(100.0,))).rows
    assert row.lru == row.clairvoyant == row.unlimited
    assert row.gap_closed is None


def test_rows_say_which_policy_is_the_default(trace: Trace) -> None:
    rows = evaluate(trace, Plan(policies=tuple(POLICIES), capacity_pct=(5.0,))).rows
    assert [row.policy for row in rows if row.default] == [DEFAULT]


def test_processes_find_what_one_process_finds(trace: Trace) -> None:
    plan = Plan(policies=tuple(POLICIES), capacity_pct=(5.0, 20.0))
    seen: list[tuple[int, int]] = []
    alone = evaluate(trace, plan)
    shared = evaluate(
        trace, replace(plan, jobs=2), lambda _what, done, total: seen.append((done, total))
    )
    assert [replace(row, seconds=0) for row in shared.rows] == [
        replace(row, seconds=0) for row in alone.rows
    ]
    assert shared.timelines == alone.timelines
    assert seen[-1][0] == seen[-1][1] == len(seen)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_driver_raises_is_not_lost(trace: Trace, jobs: int) -> None:
    def broken(*_: object) -> Outcome:
        raise InternalError("a page was lost", hint="report it")

    with pytest.raises(InternalError, match="a page was lost; report it"):
        evaluate(trace, Plan(jobs=jobs), driver=broken)


def test_a_trace_without_blocks_is_refused(trace: Trace) -> None:
    empty = replace(trace, ids=trace.ids[:0], offset=trace.offset * 0)
    with pytest.raises(ConfigError, match="no blocks"):
        evaluate(empty, Plan())


# ---- JSON and table ----
def test_json_has_everything_as_plain_values(trace: Trace) -> None:
    plan = Plan(policies=("lru",), capacity_pct=(5.0, 20.0))
    read = ReadTrace(trace, (Problem(3, "not JSON"),), 4, local_ids=True)
    found = evaluate(trace, plan)
    result = json.loads(json.dumps(Report.of(plan, [(trace_facts(read, plan), found)]).as_json()))
    assert set(result) == {"tool", "parameters", "traces", "rows", "timeline"}
    assert result["tool"].startswith("tutti")
    assert result["parameters"]["capacity_pct"] == [5.0, 20.0]
    facts = result["traces"][0]
    assert (facts["lines_skipped"], facts["local_ids"]) == (4, True)
    assert facts["problems"] == [{"line": 3, "reason": "not JSON"}]
    assert result["rows"][0]["gap_closed"] is None or result["rows"][0]["gap_closed"] == 0
    bins = [each for each in result["timeline"] if each["capacity_pct"] == 5.0]
    assert sum(each["dram"] + each["nvme"] + each["missed"] for each in bins) == len(trace.ids)


def test_a_table_shows_each_row_and_takes_no_markup(trace: Trace) -> None:
    odd = replace(trace, name="[red]odd[/nonsense]")
    plan = Plan(policies=tuple(POLICIES), capacity_pct=(5.0,))
    console = Console(width=200)
    with console.capture() as shown:
        for table in tables(reported(odd, plan, evaluate(odd, plan, driver=fake))):
            console.print(table)
    text = shown.get()
    assert "[red]odd[/nonsense]" in text
    for policy in POLICIES:
        assert policy in text


# ---- page ----
class Page(HTMLParser):
    """Checks that tags nest, and gathers text, attributes and styles."""

    VOID = frozenset({"meta", "path", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "path"
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def page_text(trace: Trace) -> str:
    plan = Plan(policies=tuple(POLICIES), capacity_pct=(2.0, 10.0, 50.0))
    return html_page(reported(trace, plan, evaluate(trace, plan)))


def test_the_page_is_well_formed_and_names_every_curve(page_text: str) -> None:
    page = Page(page_text)
    for word in (*POLICIES, "unlimited", "clairvoyant", "DRAM hits", "NVMe hits", "misses"):
        assert word in page.words
    assert f"{DEFAULT} (default)" in page.words
    assert page.tags.count("svg") >= 2
    assert page.words.count("0.75") >= 2  # both charts have their axes


def test_the_page_needs_nothing_else(page_text: str) -> None:
    page = Page(page_text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & {name for name, _ in page.attributes}
    for sign in ("http:", "https:", "url(", "@import", "//"):
        assert sign not in page_text


def test_the_page_suits_dark_screens_and_phones(page_text: str) -> None:
    assert "prefers-color-scheme: dark" in page_text
    assert 'content="width=device-width, initial-scale=1"' in page_text
    assert "flex-wrap: wrap" in page_text and "overflow-x: auto" in page_text
    style = page_text.partition("<style>")[2].partition("</style>")[0]
    sizes = [part.partition("px")[0] for part in style.split("font-size: ")[1:]]
    assert sizes and min(int(size) for size in sizes) >= 12
    assert "<text" not in page_text  # text in a scaled SVG would shrink with it


def test_names_cannot_break_out_of_the_page(trace: Trace) -> None:
    odd = replace(trace, name=MALICE)
    plan = Plan(capacity_pct=(5.0,))
    found = evaluate(odd, plan, driver=fake)
    rows = [replace(row, policy=MALICE) for row in found.rows]
    lines = [replace(line, policy=MALICE) for line in found.timelines]
    page = Page(html_page(reported(odd, plan, Evaluation(rows, lines))))
    assert "script" not in page.tags
    assert page.words.count(MALICE) >= 4  # title, heading, legend, chart, table


def test_what_was_wrong_with_a_trace_is_on_the_page(trace: Trace) -> None:
    plan = Plan(capacity_pct=(5.0,))
    read = ReadTrace(trace, (), 4, local_ids=True)
    facts = trace_facts(read, plan)
    words = Page(html_page(Report.of(plan, [(facts, evaluate(trace, plan, driver=fake))]))).words
    assert "4 malformed lines were left out" in words
    assert "ids named blocks alone" in words
