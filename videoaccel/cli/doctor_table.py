"""The report of `doctor` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"ok": "green", "warn": "yellow", "unknown": "cyan"}


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Prints a report, as wide as the terminal is."""
    out = console or Console(soft_wrap=False, highlight=False)
    for line in head(report["device"]):
        out.print(Text(line))
    model = report["model"]
    out.print(Text(f"{model['title']}, {model['size']}, {model['rows']} rows, {report['dtype']}"))
    out.print(ops_table(report["ops"]))
    forward = report["forward"]
    floor = "" if forward["floor_ms"] is None else f", at best {forward['floor_ms'] / 1e3:.2f} s"
    out.print(Text(f"one forward: {forward['tflop']:.0f} TFLOP, {forward['gb']:.0f} GB moved{floor}"))
    if report["measured"] is not None:
        out.print(measured_table(report["measured"]))
    out.print(setup_table(report["setup"]))
    for note in report["notes"]:
        out.print(Text(f"note: {note}"))


def shown(value: float | None, digits: int = 0) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def head(device: dict[str, Any]) -> list[str]:
    """The device in two lines, and its rules."""
    where = "in this machine" if device["live"] else "from the catalogue"
    shared = device["shared_memory_bytes"]
    lines = [
        f"{device['name']} ({device['arch']}), {where}",
        f"memory {shown(device['memory_gb'], 1)} GB at {shown(device['bandwidth_gb_s'])} GB/s; dense TFLOP/s "
        f"bf16 {shown(device['bf16_tflops'], 1)}, fp8 {shown(device['fp8_tflops'], 1)}; shared memory "
        f"{shown(None if shared is None else shared / 1024)} KB a block; {device['link'] or 'link unknown'}, "
        f"{shown(device['link_gb_s'], 1)} GB/s one way; P2P {device['p2p']}",
    ]
    lines += [
        f"explicit on it: {op} must be {' or '.join(names)}" for op, names in device["explicit"].items()
    ]
    return lines


def ops_table(ops: list[dict[str, Any]]) -> Table:
    """One row an op: the choice, its cost, and what stood in the way of better ones."""
    table = Table(title="ops of one forward", title_justify="left")
    for name in ("op", "chosen"):
        table.add_column(name, no_wrap=True)
    for name in ("share", "at best", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rejected, and what would do better", ratio=1)
    for op in ops:
        reasons = [f"{rejected['impl']} {rejected['why']}" for rejected in op["rejected"]]
        reasons += [op["why"]] if op["impl"] is None else []
        said = Text("\n".join(reasons))
        if op["better"]:
            said.append(f"{chr(10) if reasons else ''}better: {op['better']}", style=STYLES["warn"])
        share = "-" if op["share"] is None else f"{op['share'] * 100:.1f} %"
        time = "-" if op["floor_ms"] is None else f"{op['floor_ms']:,.1f} ms"
        table.add_row(Text(op["op"]), Text(op["impl"] or "none"), share, time, str(op["calls"]), said)
    return table


def measured_table(rows: list[dict[str, Any]]) -> Table:
    """One row an implementation."""
    table = Table(title="measured, one call at the largest sizes", title_justify="left")
    for name in ("op", "implementation"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "achieved", "of ceiling"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error", ratio=1)
    for row in rows:
        achieved = "-" if row["achieved"] is None else f"{row['achieved']:,.0f} {row['unit']}"
        share = "-" if row["of_ceiling"] is None else f"{row['of_ceiling'] * 100:.0f} %"
        cells = [row["op"], row["impl"], shown(row["ms"], 3), achieved, share, row["error"] or ""]
        table.add_row(*map(Text, cells))
    return table


def setup_table(findings: list[dict[str, Any]]) -> Table:
    """One row a check."""
    table = Table(title="set-up of this machine", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", ratio=1)
    table.add_column("to do", ratio=1)
    for finding in findings:
        state = Text(finding["state"], style=STYLES[finding["state"]])
        table.add_row(Text(finding["check"]), state, Text(finding["says"]), Text(finding["fix"]))
    return table
