"""What an evaluation found, as a table and as JSON; `page` makes the HTML.

The JSON: `tool` (version), `parameters`, `traces` (one object each), `rows` (fields of
`evaluate.Row`), `timeline` (one object a bin, with trace, policy and capacity).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import ByteSize
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tutti_core.replay.evaluate import Evaluation, Plan, Row, Timeline
from tutti_core.replay.mooncake import ReadTrace


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that table, JSON and page show. `parameters` and `traces` are plain values."""

    tool: str
    parameters: Mapping[str, Any]
    traces: Sequence[Mapping[str, Any]]
    rows: Sequence[Row]
    timelines: Sequence[Timeline]

    @classmethod
    def of(cls, plan: Plan, found: Sequence[tuple[Mapping[str, Any], Evaluation]]) -> Report:
        """Gather the evaluations of some traces, each with its `trace_facts`."""
        return cls(
            tool=tool_version(),
            parameters=dataclasses.asdict(plan),
            traces=[facts for facts, _ in found],
            rows=[row for _, evaluation in found for row in evaluation.rows],
            timelines=[line for _, evaluation in found for line in evaluation.timelines],
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "tool": self.tool,
            "parameters": dict(self.parameters),
            "traces": [dict(trace) for trace in self.traces],
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "timeline": [
                {
                    "trace": line.trace,
                    "policy": line.policy,
                    "capacity_pct": line.capacity_pct,
                    "capacity_pages": line.capacity_pages,
                    **dataclasses.asdict(each),
                }
                for line in self.timelines
                for each in line.bins
            ],
        }


def tool_version() -> str:
    """`tutti` and its version."""
    try:
        return f"tutti {version('tutti')}"
    except PackageNotFoundError:  # a source tree that was never installed
        return "tutti"


def trace_facts(read: ReadTrace, plan: Plan) -> dict[str, Any]:
    """What a trace is, and how its file was read."""
    trace = read.trace
    inputs, outputs = int(trace.input_length.sum()), int(trace.output_length.sum())
    return {
        "name": trace.name,
        "requests": len(trace),
        "seconds": trace.seconds,
        "blocks": len(trace.ids),
        "unique_blocks": len(trace.unique_ids),
        "block_tokens": trace.block_tokens,
        "page_bytes": plan.bytes_of_page(trace),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "local_ids": read.local_ids,
        "lines_skipped": read.problem_count,
        "problems": [dataclasses.asdict(problem) for problem in read.problems],
    }


def words(row: Row) -> dict[str, str]:
    """One row by column heading; `*` marks the default policy."""
    return {
        "policy": f"{row.policy} *" if row.default else row.policy,
        "capacity %": f"{row.capacity_pct:g}",
        "pages": str(row.capacity_pages),
        "hit rate": f"{row.hit_rate:.3f}",
        "by tokens": f"{row.hit_rate_tokens:.3f}",
        "DRAM": f"{row.hit_rate_dram:.3f}",
        "NVMe": f"{row.hit_rate_nvme:.3f}",
        "LRU": f"{row.lru:.3f}",
        "clairvoyant": f"{row.clairvoyant:.3f}",
        "unlimited": f"{row.unlimited:.3f}",
        "gap closed": "-" if row.gap_closed is None else f"{row.gap_closed:.2f}",
        "written": ByteSize(row.bytes_written).human_readable(),
        "seconds": f"{row.seconds:.1f}",
    }


# The table fits 80 columns, so headings are broken, and what is the same in each row is left out.
_TABLE_HEADINGS = {
    "policy": "policy",
    "capacity %": "%",
    "pages": "pages",
    "hit rate": "hit\nrate",
    "by tokens": "by\ntokens",
    "DRAM": "DRAM",
    "NVMe": "NVMe",
    "LRU": "LRU",
    "clairvoyant": "clair-\nvoyant",
    "gap closed": "gap\nclosed",
    "written": "written",
}


def tables(report: Report) -> list[Table]:
    """One table a trace."""
    return [_table(trace, report.rows) for trace in report.traces]


def _table(trace: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if row.trace == trace["name"]]
    title = (
        f"{escape(str(trace['name']))}: {trace['requests']} requests, "
        f"{trace['blocks']} blocks of {trace['block_tokens']} tokens, "
        f"{trace['unique_blocks']} unique"
    )
    note = f"unlimited: {rows[0].unlimited:.3f}   *: the default policy" if rows else None
    table = Table(
        title=title,
        title_justify="left",
        caption=note,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for heading, label in _TABLE_HEADINGS.items():
        table.add_column(label, justify="left" if heading == "policy" else "right", no_wrap=True)
    for row in rows:
        shown = words(row)
        table.add_row(*(escape(shown[heading]) for heading in _TABLE_HEADINGS))
    return table
