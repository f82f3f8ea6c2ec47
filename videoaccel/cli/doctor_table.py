"""The report of `doctor` as text: what is to be copied (a fix) or searched for stays on one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"ok": "green", "warn": "yellow", "unknown": "cyan", "optional": "dim"}


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Prints a report. Tables fit 80 columns; lines are left to the terminal to wrap."""
    out = console or Console(highlight=False)
    model, forward = report["model"], report["forward"]
    for line in device_lines(report["device"]):
        out.print(Text(line), soft_wrap=True)
    out.print(Text(f"{model['title']}, {model['size']}, {model['rows']:,} rows, {report['dtype']}\n"))
    out.print(ops_table(report["ops"]))
    floor = "" if forward["floor_ms"] is None else f", at best {forward['floor_ms'] / 1e3:.2f} s"
    out.print(Text(f"one forward: {forward['tflop']:,.0f} TFLOP, {forward['gb']:,.0f} GB moved{floor}\n"))
    for text in reason_lines(report["ops"]):
        out.print(text, soft_wrap=True)
    if report["measured"] is not None:
        out.print()
        out.print(measured_table(report["measured"]))
        for row in report["measured"]:
            if row["error"] is not None:
                out.print(Text(f"{row['op']} {row['impl']}: {row['error']}"), soft_wrap=True)
    out.print(Text("\nset-up of this machine"))
    for text in setup_lines(report["setup"]):
        out.print(text, soft_wrap=True)
    out.print()
    for note in report["notes"]:
        out.print(Text(f"note: {note}"), soft_wrap=True)


def shown(value: float | None, digits: int = 0) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def device_lines(device: dict[str, Any]) -> Iterator[str]:
    """The device, what it has, and its rules."""
    where = "in this machine" if device["live"] else "from the catalogue"
    shared = device["shared_memory_bytes"]
    yield f"{device['name']} ({device['arch']}), {where}"
    facts = {
        "memory": (device["memory_gb"], 1, "GB"),
        "bandwidth": (device["bandwidth_gb_s"], 0, "GB/s"),
        "bf16": (device["bf16_tflops"], 1, "TFLOP/s"),
        "fp8": (device["fp8_tflops"], 1, "TFLOP/s"),
        "shared memory": (None if shared is None else shared / 1024, 0, "KB a block"),
    }
    known = [f"{name} {value:,.{d}f} {unit}" for name, (value, d, unit) in facts.items() if value is not None]
    if device["link"] is not None:
        known.append(f"{device['link']}, {shown(device['link_gb_s'], 1)} GB/s one way")
    if known:
        yield f"{'; '.join(known)}; P2P {device['p2p']}"
    for op, names in device["explicit"].items():
        yield f"explicit on it: {op} must be {' or '.join(names)}"


def _columns(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """An empty table, of words to the left and numbers to the right."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def ops_table(ops: list[dict[str, Any]]) -> Table:
    """One row an op: the choice and what it costs at least."""
    words, numbers = ("op", "chosen"), ("TFLOP", "GB", "best ms", "bound", "share")
    table = _columns("ops of one forward", words, numbers)
    for op in ops:
        share = "-" if op["share"] is None else f"{op['share'] * 100:.1f} %"
        # Ops of no matrix multiplication have none worth counting.
        flops = shown(op["tflop"] or None)
        cells = [flops, shown(op["gb"]), shown(op["floor_ms"], 1), op["bound"] or "-", share]
        table.add_row(Text(op["op"]), Text(op["impl"] or "none"), *cells)
    return table


def reason_lines(ops: list[dict[str, Any]]) -> Iterator[Text]:
    """Why each op got what it got, and what it did not get; ops of one answer share it."""
    answers: dict[tuple[Any, ...], list[str]] = {}
    for op in ops:
        rejected = tuple((other["impl"], other["why"]) for other in op["rejected"])
        key = (op["impl"], op["why"], op["better"] is not None, rejected)
        answers.setdefault(key, []).append(op["op"])
    for (impl, why, could, rejected), names in answers.items():
        said = f"{', '.join(names)}: {impl or 'none'}, {why}"
        yield Text(said + ", and this device could run a better one" * could, style="yellow" * could)
        for other, reason in rejected:
            yield Text(f"  not {other}" + (f": {reason}" if reason != why else ""))


def measured_table(rows: list[dict[str, Any]]) -> Table:
    """One row an implementation."""
    table = _columns(
        "measured, one call at its largest sizes", ("op", "by"), ("ms", "achieved", "of ceiling")
    )
    for row in rows:
        achieved = "-" if row["achieved"] is None else f"{row['achieved']:,.0f} {row['unit']}"
        share = "-" if row["of_ceiling"] is None else f"{row['of_ceiling'] * 100:.0f} %"
        table.add_row(Text(row["op"]), Text(row["impl"]), shown(row["ms"], 3), achieved, share)
    return table


def setup_lines(findings: list[dict[str, Any]]) -> Iterator[Text]:
    """A line a check, and one below it where there is something to do."""
    states, checks = (max(len(found[key]) for found in findings) for key in ("state", "check"))
    for found in findings:
        text = Text(f"{found['state']:{states}}", style=STYLES[found["state"]])
        text.append(f"  {found['check']:{checks}}  {found['says']}", style="default")
        if found["fix"]:
            text.append(f"\n{'':{states + checks + 4}}to do: {found['fix']}", style="default")
        yield text
