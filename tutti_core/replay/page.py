"""An evaluation as one HTML page that needs nothing else: no network, no script, no fonts.

Charts are inline SVG without text, stretched to the width there is; the labels around them are
HTML, so that they stay at their size on a phone and on a wide screen. Everything that comes from
outside (names of traces and policies) goes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tutti_core.replay.evaluate import Row, Timeline
from tutti_core.replay.report import Report, words

_TIMELINE_PCT = 10.0  # a timeline is drawn at the capacity nearest to this
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_COLOURS = 8  # --c0 .. --c7 of the style sheet

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --back: #fff;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989; --c5: #7d6200;
  --c6: #0a7f83; --c7: #cf222e;
  --dram: #1a7f37; --nvme: #54a6ff; --missed: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b1; --line: #3d444d;
  --back: #0d1117; --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff; --c4: #f778ba;
  --c5: #d4b106; --c6: #39c5cf; --c7: #ff7b72;
  --dram: #3fb950; --nvme: #1f6feb; --missed: #3d444d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin-top: 2rem; } h3 { font-size: 15px; }
p, figcaption { color: var(--soft); font-size: 14px; }
figure { margin: 0 0 1.5rem; }
.chart { position: relative; height: 18rem; margin: .5rem 1.5rem 1.75rem 2.75rem;
  border: solid var(--line); border-width: 0 0 1px 1px; }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.chart span { position: absolute; font-size: 12px; line-height: 1; color: var(--soft);
  white-space: nowrap; }
.chart .x { top: calc(100% + .4rem); transform: translateX(-50%); }
.chart .y { right: calc(100% + .4rem); transform: translateY(50%); }
path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
path.grid { stroke: var(--line); stroke-width: 1; }
path.dot { stroke-width: 7; stroke-linecap: round; }
path.area { stroke: none; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: 0 0 .5rem; padding: 0;
  font-size: 13px; list-style: none; }
.legend svg { width: 26px; height: 10px; margin-right: .35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
"""


def html_page(report: Report) -> str:
    """The whole page."""
    names = ", ".join(str(trace["name"]) for trace in report.traces)
    sections = "\n".join(_section(trace, report) for trace in report.traces)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tutti replay: {escape(names)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>What a cache would have hit</h1>
<p>{escape(report.tool)}. A hit is a block at the front of a request that is stored, with all before
it, when the request starts. Unlimited never evicts; clairvoyant knows the future and is the best
any policy can do at a capacity.</p>
{sections}
</body>
</html>
"""


def _section(trace: Mapping[str, Any], report: Report) -> str:
    rows = [row for row in report.rows if row.trace == trace["name"]]
    lines = [line for line in report.timelines if line.trace == trace["name"]]
    charts = [_rates_figure(rows)] if rows else []
    if lines:
        nearest = min(lines, key=lambda line: abs(math.log(line.capacity_pct / _TIMELINE_PCT)))
        charts.append(_timeline_figure(nearest))
    return f"""<section>
<h2>{escape(str(trace["name"]))}</h2>
<p>{trace["requests"]:,} requests in {_time_words(float(trace["seconds"]))},
{trace["blocks"]:,} blocks of {trace["block_tokens"]} tokens, {trace["unique_blocks"]:,} of them
unique; {trace["input_tokens"]:,} tokens in, {trace["output_tokens"]:,} out.
{_reading_words(trace)}</p>
{"".join(charts)}
{_table(rows)}
</section>"""


def _reading_words(trace: Mapping[str, Any]) -> str:
    words = ""
    if trace["local_ids"]:
        words += "Its ids named blocks alone; prefixes were made of them. "
    if trace["lines_skipped"]:
        words += f"{trace['lines_skipped']} malformed lines were left out."
    return words


# ---- hit rate over capacity ----
def _rates_figure(rows: Sequence[Row]) -> str:
    """The curves of all policies between the bounds. Capacity is on a logarithmic axis."""
    capacities = sorted({row.capacity_pct for row in rows})
    place = _log_scale(capacities)
    policies = list(dict.fromkeys(row.policy for row in rows))
    bounds = [
        ("unlimited", "stroke:var(--soft);stroke-dasharray:2 3", "unlimited"),
        ("clairvoyant", "stroke:var(--ink);stroke-dasharray:7 3", "clairvoyant"),
    ]
    paths, legend = [], []
    for label, style, name in bounds:
        points = {row.capacity_pct: float(getattr(row, name)) for row in rows}
        paths.append(_curve(points, place, style, dots=False))
        legend.append((label, style))
    for i, policy in enumerate(policies):
        style = f"stroke:var(--c{i % _COLOURS})"
        dashes = _DASHES[i // _COLOURS % len(_DASHES)]
        style += f";stroke-dasharray:{dashes}" if dashes else ""
        own = [row for row in rows if row.policy == policy]
        points = {row.capacity_pct: row.hit_rate for row in own}
        paths.append(_curve(points, place, style, dots=True))
        legend.append((f"{policy} (default)" if own[0].default else policy, style))
    x_labels = [(place[share], f"{share:g}") for share in capacities]
    return f"""<figure>
<h3>Hit rate over capacity</h3>
{_chart("hit rate over capacity", paths, x_labels)}
{_legend(legend)}
<figcaption>Share of blocks; capacity in percent of the unique blocks.</figcaption>
</figure>
"""


def _log_scale(capacities: Sequence[float]) -> dict[float, float]:
    """Where each capacity is on the axis, in percent of its length."""
    low, high = math.log(capacities[0]), math.log(capacities[-1])
    if low == high:
        return {capacities[0]: 50.0}
    return {share: 100 * (math.log(share) - low) / (high - low) for share in capacities}


def _curve(
    points: Mapping[float, float], place: Mapping[float, float], style: str, dots: bool
) -> str:
    at = [(place[share], 100 - 100 * rate) for share, rate in sorted(points.items())]
    if len(at) == 1:
        at = [(0.0, at[0][1]), *at, (100.0, at[0][1])]
    line = "L".join(f"{x:.2f} {y:.2f}" for x, y in at)
    found = f'<path d="M{line}" style="{style}"/>'
    if dots:
        spots = "".join(f"M{x:.2f} {y:.2f}h0" for x, y in at)
        colour = style.partition(";")[0]
        found += f'<path class="dot" d="{spots}" style="{colour}"/>'
    return found


# ---- tiers over time ----
def _timeline_figure(line: Timeline) -> str:
    """Stacked shares of each bin: DRAM at the bottom, then NVMe, then what was missed."""
    series: dict[str, list[str]] = {"dram": [], "nvme": [], "missed": []}
    for i, each in enumerate(line.bins):
        total = each.dram + each.nvme + each.missed
        top = 100.0
        for name in series if total else ():
            height = 100 * getattr(each, name) / total
            top -= height
            if height:
                series[name].append(f"M{i} {top:.2f}h1v{height:.2f}h-1z")
    paths = [
        f'<path class="area" d="{"".join(parts)}" style="fill:var(--{name})"/>'
        for name, parts in series.items()
    ]
    bins = max(len(line.bins), 1)
    end_s = line.bins[-1].time_s * bins / max(bins - 1, 1) if line.bins else 0.0
    x_labels = [(100.0 * part / 4, _time_words(end_s * part / 4)) for part in (0, 2, 4)]
    labels = {"dram": "DRAM hits", "nvme": "NVMe hits", "missed": "misses"}
    legend = [(label, f"stroke:var(--{name});stroke-width:10") for name, label in labels.items()]
    title = f"Where blocks were found: {escape(line.policy)} at {line.capacity_pct:g} %"
    return f"""<figure>
<h3>{title}</h3>
{_chart("tiers over time", paths, x_labels, width=bins)}
{_legend(legend)}
<figcaption>Share of the blocks asked for in each span of time; blank where there were none.
</figcaption>
</figure>
"""


def _time_words(seconds: float) -> str:
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


# ---- pieces ----
def _chart(
    label: str, paths: Sequence[str], x_labels: Sequence[tuple[float, str]], width: int = 100
) -> str:
    """A chart whose y axis is a share; its SVG is `width` by 100 units, y downwards."""
    shares = (0, 25, 50, 75, 100)
    grid = "".join(f"M0 {100 - share}h{width}" for share in shares[1:])
    y_axis = "".join(
        f'<span class="y" style="bottom:{share}%">{share / 100:g}</span>' for share in shares
    )
    x_axis = "".join(
        f'<span class="x" style="left:{x:.2f}%">{escape(text)}</span>' for x, text in x_labels
    )
    return f"""<div class="chart">
<svg viewBox="0 0 {width} 100" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">
<path class="grid" d="{grid}"/>{"".join(paths)}</svg>
{y_axis}{x_axis}</div>"""


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 26 10" aria-hidden="true"><path d="M0 5h26" style="{style}"/></svg>'
        f"{escape(text)}</li>"
        for text, style in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in words(rows[0]))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in words(row).values()) + "</tr>\n"
        for row in rows
    )
    return f"""<div class="scroll"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table></div>
<p>*: the default policy</p>"""
