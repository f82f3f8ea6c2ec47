"""The closed loop of `videoaccel bench`: as many requests in the system as asked, a new one as one ends."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from videoaccel.cli.latency import latency_summary
from videoaccel.config import AccelConfig
from videoaccel.install import Handle
from videoaccel.pipelines.request import Request
from videoaccel.receipt import STAGES, Receipt
from videoaccel.runner import run_request
from videoaccel.schema import to_plain


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every request of a benchmark does.

    Attributes:
        request: the request; each one gets its own seed, counting up.
        prompt_embeds: `(1, L, D)` where there is no text encoder, else None.
        stages: the stages that are run; the others are reported as null.
        streams: what a clip of the family has, as `Family.streams`.
    """

    request: Request
    prompt_embeds: torch.Tensor | None
    stages: tuple[str, ...]
    streams: tuple[str, ...]

    def numbered(self, index: int) -> Request:
        """Request number `index`."""
        return dataclasses.replace(self.request, seed=self.request.seed + index)


class Ended(NamedTuple):
    """What is kept of a request. Its clip and run are let go: they hold gigabytes on host and device, which
    would fill the one and count as the peak of the other.

    Attributes:
        receipt: the record.
        latency_s: from submission to the written file, waiting for the device included.
    """

    receipt: Receipt
    latency_s: float


@dataclass(kw_only=True)
class Measured:
    """A row's raw figures.

    Attributes:
        ended: the timed requests, in the order they ended.
        wall_s: seconds in which they ran, from the first one sent to the last one ended; bare calls left out.
        bare_s: seconds of each bare diffusers run, empty where none was made.
        ours_s: seconds of the same part of our own requests, in the same order.
    """

    ended: list[Ended] = field(default_factory=list)
    wall_s: float = 0.0
    bare_s: list[float] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)


def measure(
    handle: Handle,
    work: Work,
    *,
    requests: int,
    inflight: int,
    warmup: int,
    compare: bool,
    say: Callable[[str], None],
) -> Measured:
    """Warms up with whole requests, then runs `requests` of them in a closed loop.

    With `compare` each of our runs has a run of diffusers' own beside it; the two take turns to go first, so
    that clocks and temperature drift on both alike. With more than one request in flight the pairs are run
    after the loop, one by one.
    """
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="videoaccel-bench-") as folder:
        gate = threading.Lock()
        stop = threading.Event()

        def one(index: int) -> Ended:
            out = Path(folder) / f"{index}.mp4"
            outcome = run_request(
                handle,
                work.numbered(index),
                out=out if "mux" in work.stages else None,
                prompt_embeds=work.prompt_embeds,
                decode="decode" in work.stages,
                device_gate=gate,
                cancel=stop.is_set,
            )
            out.unlink(missing_ok=True)
            return Ended(outcome.receipt, outcome.latency_s)

        for index in range(warmup):
            say(f"warm-up {index + 1}/{warmup}")
            one(index)
        if inflight == 1:
            for index in range(requests):
                bare_first = compare and index % 2 == 1
                bare = bare_run(handle, work, index) if bare_first else None
                start = time.perf_counter()
                ended = one(index)
                measured.wall_s += time.perf_counter() - start
                measured.ended.append(ended)
                say(f"request {index + 1}/{requests}: {ended.latency_s:.2f} s")
                if compare and not bare_first:
                    bare = bare_run(handle, work, index)
                if bare is not None:
                    measured.bare_s.append(bare)
                    measured.ours_s.append(comparable(ended, work))
                    say(f"bare diffusers: {bare:.2f} s")
            return measured
        start = time.perf_counter()
        measured.ended = closed_loop(one, requests=requests, inflight=inflight, say=say, stop=stop)
        measured.wall_s = time.perf_counter() - start
        for index in range(requests if compare else 0):
            sides = ("ours", "bare") if index % 2 == 0 else ("bare", "ours")
            took: dict[str, float | None] = {}
            for side in sides:
                took[side] = comparable(one(index), work) if side == "ours" else bare_run(handle, work, index)
            if took["bare"] is not None and took["ours"] is not None:
                measured.bare_s.append(took["bare"])
                measured.ours_s.append(took["ours"])
                say(f"pair {index + 1}/{requests}: {took['ours']:.2f} s, bare diffusers {took['bare']:.2f} s")
    return measured


def closed_loop(
    one: Callable[[int], Ended],
    *,
    requests: int,
    inflight: int,
    say: Callable[[str], None],
    stop: threading.Event,
) -> list[Ended]:
    """Keeps `inflight` requests in the system until `requests` have ended.

    The first error ends it, and so does Ctrl-C: either sets `stop`, which `one` should heed, and is raised
    once no request runs any more.
    """
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(requests):
        numbers.put(index)
    ended: list[Ended] = []
    errors: list[BaseException] = []
    count = itertools.count(1)

    def client(done: threading.Event) -> None:
        try:
            serve()
        finally:
            done.set()

    def serve() -> None:
        while not stop.is_set():
            try:
                index = numbers.get_nowait()
            except queue.Empty:
                return
            try:
                request = one(index)
            except BaseException as error:  # handed to the caller, whatever it is
                errors.append(error)
                stop.set()
                return
            ended.append(request)
            say(f"request {next(count)}/{requests}: {request.latency_s:.2f} s")

    # Waited for by events: a join that Ctrl-C breaks off takes its thread for ended (Python 3.11 and 3.12).
    done = [threading.Event() for _ in range(min(inflight, requests))]
    clients = [threading.Thread(target=client, args=(event,), daemon=True) for event in done]
    try:
        for thread in clients:
            thread.start()
        for event in done:
            event.wait()
    except KeyboardInterrupt:
        # A thread still in torch when the interpreter ends aborts the process.
        stop.set()
        for thread, event in zip(clients, done, strict=True):
            if thread.ident is not None:
                event.wait()
        raise
    if errors:
        raise errors[0]
    return ended


def bare_run(handle: Handle, work: Work, index: int) -> float | None:
    """Seconds of diffusers' own run of request `index`: its call, or its loop alone without an encoder."""
    run = handle.family.start(
        handle.pipe, work.numbered(index), prompt_embeds=work.prompt_embeds, decode="decode" in work.stages
    )
    if work.prompt_embeds is None:
        return run.stock_call()
    run.encode()
    return run.stock_loop()


def comparable(ended: Ended, work: Work) -> float:
    """The seconds of our run that `bare_run` has a counterpart for."""
    times = ended.receipt.timings
    if work.prompt_embeds is None:
        return times.encode_s + times.denoise_s + times.decode_s
    return times.denoise_s


def row_of(
    tier: str, config: AccelConfig, work: Work, measured: Measured, *, inflight: int
) -> dict[str, Any]:
    """One tier's row of the benchmark: figures of what was run, null for what was not."""
    receipts = [ended.receipt for ended in measured.ended]
    first = receipts[0]
    whole = set(work.stages) == set(STAGES)
    peaks = [r.memory for r in receipts if r.memory.peak_allocated is not None]
    row: dict[str, Any] = {
        "tier": tier,
        "config": config.to_dict(),
        "sections": {key: to_plain(section) for key, section in config.sections().items()},
        "steps": first.steps,
        "forwards": first.forwards.run,
        "requests": len(receipts),
        "inflight": inflight,
        "latency_s": latency_summary([ended.latency_s for ended in measured.ended]),
        "stage_s": {
            name: statistics.median(getattr(r.timings, f"{name}_s") for r in receipts)
            if name in work.stages
            else None
            for name in STAGES
        },
        "step_s_median": statistics.median(s for r in receipts for s in r.timings.step_s),
        "clips_per_hour": 3600 * len(receipts) / measured.wall_s if whole else None,
        "requests_per_hour": 3600 * len(receipts) / measured.wall_s,
        "counts": counts(work),
        "wall_s": measured.wall_s,
        "peak_allocated_gb": max(m.peak_allocated or 0 for m in peaks) / 1e9 if peaks else None,
        "peak_reserved_gb": max(m.peak_reserved or 0 for m in peaks) / 1e9 if peaks else None,
        "bare_diffusers": None,
        "receipts": [r.to_dict() for r in receipts],
    }
    if measured.bare_s:
        ours, bare = statistics.median(measured.ours_s), statistics.median(measured.bare_s)
        row["bare_diffusers"] = {
            "compares": "pipeline call: encode, denoise, decode"
            if work.prompt_embeds is None
            else "denoise loop",
            "ours_s": measured.ours_s,
            "bare_s": measured.bare_s,
            "ratio": ours / bare,
        }
    return row


def counts(work: Work) -> str:
    """What the hourly figure counts, in words."""
    left_out = [name for name in STAGES if name not in work.stages]
    if not left_out:
        files = "mp4 files with sound" if "audio" in work.streams else "mp4 files"
        return f"finished {files}, from submission to file: encode, denoise, decode and mux"
    return (
        f"requests that ran {', '.join(work.stages)}; {', '.join(left_out)} not run, so no clips are counted"
    )
