"""The per-request record: what was asked, what was served, what it cost, which limit bound.

`Receipt` is the finished record, immutable, JSON in and out. `Recorder` is the one object that holds a
request's record while it runs: made at the request's start, dropped at its end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from videoaccel.config import AccelConfig, RiskBudget
from videoaccel.errors import UserError
from videoaccel.files import write_text
from videoaccel.schema import fields_of, from_plain, strict, to_plain

FORMAT = 1
"""Version of the receipt's JSON; raised when a key changes its meaning or goes."""

Stage = Literal["encode", "denoise", "decode", "mux"]
Status = Literal["completed", "failed", "cancelled"]
STAGES: tuple[Stage, ...] = ("encode", "denoise", "decode", "mux")


@strict
@dataclass(frozen=True, kw_only=True)
class Forwards:
    """Transformer forwards by kind, summed over guidance branches.

    Attributes:
        dense: run in full.
        sparse: run with sparse attention.
        probe: run in part, to decide. They cost time, so they count as forwards.
        reused: not run; the velocity was forecast.
    """

    dense: int = 0
    sparse: int = 0
    probe: int = 0
    reused: int = 0

    @property
    def run(self) -> int:
        """Forwards that were run, in full or in part."""
        return self.dense + self.sparse + self.probe


@strict
@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds, each stage timed after device synchronisation; 0 for a stage that was not run.

    Attributes:
        encode_s, denoise_s, decode_s, mux_s: per stage; `mux_s` is writing the mp4, sound included.
        step_s: one entry a denoising step.
        compile_s: of them, what torch took to compile.
        compilations: how often it compiled: once is the warm-up of a new canvas or length.
    """

    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    mux_s: float = 0.0
    step_s: tuple[float, ...] = ()
    compile_s: float = 0.0
    compilations: int = 0

    @property
    def total_s(self) -> float:
        """The four stages together."""
        return self.encode_s + self.denoise_s + self.decode_s + self.mux_s


@strict
@dataclass(frozen=True, kw_only=True)
class Rejected:
    """An implementation that was not chosen, and why."""

    impl: str
    why: str


@strict
@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """What ran for one op.

    Attributes:
        op: the op, as in "attention".
        impl: the implementation chosen.
        why: the reason.
        rejected: better candidates that were turned down, each with its reason.
    """

    op: str
    impl: str
    why: str
    rejected: tuple[Rejected, ...] = ()


@strict
@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes.

    Attributes:
        state: held by techniques for this request at its largest (caches, tile lists).
        peak_allocated, peak_reserved: of this process on the device while the request ran. None where another
            request ran beside it, whose part can't be told apart, or the device doesn't say (CPU).
    """

    state: int = 0
    peak_allocated: int | None = None
    peak_reserved: int | None = None


@strict
@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One request's record.

    Attributes:
        tier_asked, tier_served: they differ only where a note says why.
        budget: the risk budget in force; None where the tier has none.
        spend: risk spent, per stream, in the budget's unit. Empty where nothing spends.
        binding_limit: what stopped more from being saved; None where nothing was there to save.
        model: the checkpoint, as given.
        weights: "pretrained", "random", "untrained" where the checkpoint says so of itself, or "unstated"
            where nobody said. A clip of random or untrained weights is only a timing.
        family, task: the adapter and the task served.
        device: name of the device that denoised.
        width, height: canvas, pixels.
        frames: frames decoded.
        fps: frames a second.
        seed: seed of the initial noise.
        rows: rows of the sequence, by role (text, condition, audio, video; see `pipelines.layout`).
        steps: denoising steps as the stock pipeline counts them.
        forwards: transformer forwards by kind.
        memory: bytes.
        timings: seconds.
        kernels: what ran for each op; empty at tier `exact`, where diffusers chooses.
        shift, sigmas: per stream, the schedule's shift and noise levels where the request set them.
        status: whether the clip was made; of a request that failed or was cancelled, the rest says how far it
            came.
        error: what ended it, in one line; None for a clip that was made.
        notes: what differs from what was asked, one sentence each.
        warnings: what the user should act on, one sentence each.
        format: version of this record.
    """

    tier_asked: str
    tier_served: str
    budget: RiskBudget | None = None
    spend: Mapping[str, float] = field(default_factory=dict)
    binding_limit: str | None = None
    model: str
    weights: str
    family: str
    task: str
    device: str
    width: int
    height: int
    frames: int
    fps: float
    seed: int
    rows: Mapping[str, int]
    steps: int
    forwards: Forwards
    memory: Memory = Memory()
    timings: Timings
    kernels: tuple[KernelChoice, ...] = ()
    shift: Mapping[str, float] = field(default_factory=dict)
    sigmas: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    status: Status = "completed"
    error: str | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Mappings, lists and scalars; keys that are None are left out."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    def summary(self) -> str:
        """The record in a few lines of text."""
        f, t = self.forwards, self.timings
        total = f.dense + f.sparse + f.reused
        spend = ", ".join(f"{stream} {cost:.4g}" for stream, cost in self.spend.items()) or "nothing"
        lines = [
            f"{self.status}: {self.task}, tier {self.tier_served}, {self.frames} frames of "
            f"{self.width}x{self.height}, seed {self.seed}",
            f"forwards: {f.dense} dense, {f.sparse} sparse, {f.reused} reused of {total}; {f.probe} probes",
            f"risk spent: {spend}; bound by: {self.binding_limit or 'nothing'}",
            f"seconds: encode {t.encode_s:.1f}, denoise {t.denoise_s:.1f}, decode {t.decode_s:.1f}",
        ]
        lines += [] if self.error is None else [f"error: {self.error}"]
        return "\n".join([*lines, *(f"note: {line}" for line in (*self.notes, *self.warnings))])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            UserError: a record of another format, an unknown, missing or ill-typed key.
        """
        if isinstance(values, Mapping) and values.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"this version reads receipts of format {FORMAT}, not {values['format']!r}: read it with the "
                "version that wrote it"
            )
        receipt: Self = from_plain(cls, values)
        return receipt

    def to_json(self) -> str:
        """Indented JSON, newline at the end."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`. Raises `UserError` as `from_dict`, and on text that is not JSON."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"receipt is not valid JSON: {error}; give one as to_json wrote it") from error
        return cls.from_dict(values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to `path`, whole or not at all. Raises `UserError` where it can't be written."""
        write_text(path, self.to_json())


def attach(error: BaseException, receipt: Receipt) -> None:
    """Put the receipt of the request that `error` ended on the error, for `receipt_of`."""
    vars(error)["videoaccel_receipt"] = receipt


def receipt_of(error: BaseException) -> Receipt | None:
    """The receipt of the request that `error` ended: how far it came. None where no request had started."""
    found = vars(error).get("videoaccel_receipt")
    return found if isinstance(found, Receipt) else None


class Recorder:
    """A request's record while it runs. Use `recording`, which ends it whatever happens.

    Attributes:
        config: the config in force.
        tier_served: starts as the tier asked; whoever changes it adds a note.
        binding_limit: see `Receipt`.
        state_bytes: largest number of bytes held by techniques so far.
    """

    def __init__(self, config: AccelConfig) -> None:
        self.config = config
        self.tier_served = config.tier
        self.binding_limit: str | None = None
        self.state_bytes = 0
        self._facts: dict[str, Any] = {}
        self._seconds: dict[str, float] = dict.fromkeys((f"{stage}_s" for stage in STAGES), 0.0)
        self._steps: list[float] = []
        self._forwards: dict[str, int] = {}
        self._spend: dict[str, float] = {}
        self._compiled: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self._kernels: dict[str, KernelChoice] = {}
        self._notes: dict[str, None] = {}  # dicts, as ordered sets: a thing is said once
        self._warnings: dict[str, None] = {}
        self._end = ExitStack()

    def describe(self, **facts: Any) -> None:
        """Set fields of the receipt that are known as they are (`task=`, `rows=`, `model=`, ...)."""
        for key, value in facts.items():
            if key not in fields_of(Receipt):
                raise TypeError(f"Receipt has no field {key!r}")
            self._facts[key] = value

    def add_seconds(self, name: Stage, seconds: float) -> None:
        """Book seconds of a stage, measured after device synchronisation; repeated stages add up."""
        self._seconds[f"{name}_s"] += seconds

    def compiling(self, read: Callable[[], tuple[int, float]]) -> None:
        """Give what says how often torch has compiled in this request so far, and the seconds that took."""
        self._compiled = read

    def step(self, seconds: float, **forwards: int) -> None:
        """Book one denoising step: its seconds, and its forwards by kind, as in `step(0.1, dense=2)`."""
        self.count(**forwards)
        self._steps.append(seconds)

    def count(self, **forwards: int) -> None:
        """Book forwards by kind, as in `count(dense=2)`."""
        for kind, count in forwards.items():
            if kind not in fields_of(Forwards):
                raise TypeError(f"Forwards has no kind {kind!r}")
            self._forwards[kind] = self._forwards.get(kind, 0) + count

    def spend(self, stream: str, cost: float) -> None:
        """Book risk, in the budget's unit.

        Raises:
            ValueError: a cost that is negative or not finite. Whoever meets one runs the step dense and notes
                why; it never enters the sum, where it would hide every later one.
        """
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"cost of {stream} must be finite and at least 0, not {cost!r}")
        self._spend[stream] = self._spend.get(stream, 0.0) + cost

    def hold(self, nbytes: int) -> None:
        """Say how many bytes techniques hold for this request now; the largest is recorded."""
        self.state_bytes = max(self.state_bytes, nbytes)

    def kernel(self, choice: KernelChoice) -> None:
        """Record what runs for an op; the last word on an op counts."""
        self._kernels[choice.op] = choice

    def note(self, sentence: str) -> None:
        """Say what differs from what was asked."""
        self._notes[sentence] = None

    def warn(self, sentence: str) -> None:
        """Say what the user should act on."""
        self._warnings[sentence] = None

    def on_end(self, release: Callable[[], None]) -> None:
        """Call `release` when the request ends, cancel and exception included, last registered first."""
        self._end.callback(release)

    def close(self) -> None:
        """Run what `on_end` registered. Idempotent."""
        self._end.close()

    def receipt(self) -> Receipt:
        """The record so far.

        Raises:
            UserError: a required field was never described.
        """
        config = self.config
        budget = config.budget() if config.has_budget() else None
        compilations, compile_s = self._compiled()
        values: dict[str, Any] = {
            "tier_asked": config.tier,
            "tier_served": self.tier_served,
            "budget": budget,
            "spend": dict(self._spend),
            "binding_limit": self.binding_limit,
            "forwards": Forwards(**self._forwards),
            "memory": Memory(state=self.state_bytes),
            "timings": Timings(
                **self._seconds,
                step_s=tuple(self._steps),
                compilations=compilations,
                compile_s=compile_s,
            ),
            "kernels": tuple(self._kernels.values()),
            "notes": tuple(self._notes),
            "warnings": tuple(self._warnings),
        }
        return Receipt(**values | self._facts)


@contextmanager
def recording(config: AccelConfig) -> Iterator[Recorder]:
    """A request's recorder, from its start to its end; `config` is the one in force."""
    recorder = Recorder(config)
    try:
        yield recorder
    finally:
        recorder.close()
