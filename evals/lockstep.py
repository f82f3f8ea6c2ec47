"""Many clips of the bundled model at once, each with controllers of its own, their forwards batched.

A clip's loop is `Run.denoise`'s: at each step its controllers are asked for the velocity, by the protocol of
`videoaccel.forward`, then the scheduler steps, then they may correct the sample. Clips meet at forwards, not
at steps: each runs on until it asks for one, and all that wait are answered by one batched forward. A clip
that reuses is steps ahead of one that does not, and clips of different step counts share a batch; every
sample has its own noise levels there. What one clip decides never depends on another: a batch is shared by
arithmetic alone, so a clip equals its own single run up to the rounding of batched kernels.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from evals.batched import StackContext, enter_blocks, leave_blocks, run_blocks, transformer_forward
from evals.sampling import Packed, Prepared, Sampled, Sampler, euler, noise_levels
from evals.turns import Asked, Worker
from evals.world.spec import ClipSpec
from videoaccel.forward import Controller, ForwardCall, Kind, answer
from videoaccel.pipelines.family import family_of
from videoaccel.pipelines.h3_layout import h3_layout
from videoaccel.pipelines.layout import Layout
from videoaccel.pipelines.request import Plan, Reference, Request, StepInfo, Streams
from videoaccel.pipelines.run import NO_CONTROLLERS

DENSE, ENTER, LEAVE = "dense", "enter", "leave"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One clip to make.

    Attributes:
        spec: the clip; its caption is the prompt and its seed draws the noise.
        forwards: steps of its schedule; diffusers calls this `num_inference_steps - 1`.
        controllers: fresh ones, of this clip alone, by key, in the order in which they compose.
    """

    spec: ClipSpec
    forwards: int = 49
    controllers: Mapping[str, Controller] = field(default_factory=lambda: NO_CONTROLLERS)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One finished clip.

    Attributes:
        sampled: its latents.
        forwards: steps by kind, as `Run.forwards`: `dense` and `sparse` where the transformer ran whole,
            `reused` where it did not, and `probe` where it ran in part.
        work: of each step, the share of the transformer's blocks that were run: 1.0 where it ran whole.
    """

    sampled: Sampled
    forwards: Counter[str]
    work: tuple[float, ...]

    @property
    def forwards_run(self) -> float:
        """Transformer work of the clip in units of one forward, probes included."""
        return sum(self.work)


@dataclass(frozen=True, kw_only=True)
class BlockCall(ForwardCall):
    """A `ForwardCall` whose controller may also run the transformer in parts.

    Attributes:
        blocks: the parts, for this forward only.
    """

    blocks: Blocks


class Blocks:
    """The transformer of one clip's forward, in parts. Each part is batched with what other clips ask for.

    Hidden states are `(S, D)`: the packed sequence, text, conditions, audio and video.

    Attributes:
        count: blocks of the transformer.
        run_here: blocks that were run through here so far.
    """

    def __init__(self, clip: _Clip, step: StepInfo, count: int) -> None:
        self._clip, self._step, self.count, self.run_here = clip, step, count, 0
        self._temb: torch.Tensor | None = None

    def enter(self) -> torch.Tensor:
        """What the first block is passed, of the current sample."""
        hidden, self._temb = self._clip.ask(_Question(ENTER, self._clip, self._clip.inputs(self._step)))
        return hidden

    def run(self, hidden: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Blocks `[start, stop)`, after `enter`; a new tensor."""
        if not 0 <= start <= stop <= self.count:
            raise ValueError(f"there are blocks 0 to {self.count}, not {start} to {stop}")
        if start == stop:
            return hidden.clone()
        self.run_here += stop - start
        return self._clip.ask(_Question((start, stop), self._clip, (hidden, self._entered())))

    def leave(self, hidden: torch.Tensor) -> Streams:
        """The velocities that the last block's hidden states mean, in the shapes of `ForwardCall.latents`."""
        return self._clip.ask(_Question(LEAVE, self._clip, (hidden, self._entered())))

    def _entered(self) -> torch.Tensor:
        if self._temb is None:
            raise RuntimeError("call enter() first: it sets this forward's noise levels")
        return self._temb


class Lockstep:
    """Runs jobs on a sampler's networks.

    Args:
        sampler: whose pipeline and device to use; one without guidance, which controllers of MiniMax-H3 never
            see.
    """

    def __init__(self, sampler: Sampler) -> None:
        if sampler.guidance is not None:
            raise ValueError("controllers see one branch; give a sampler without guidance")
        self.sampler = sampler
        self._family = family_of(sampler.pipe)

    @torch.no_grad()
    def run(
        self,
        jobs: Sequence[Job],
        *,
        task: str = "t2va",
        anchors: tuple[str, ...] = (),
        batch: int = 64,
        size: int = 128,
    ) -> list[Ran]:
        """The jobs' clips, in their order.

        Args:
            jobs: clips of one length.
            task, anchors: as in `Sampler.sample`.
            batch: clips at once.
            size: edge of the canvas, px.

        Raises:
            FloatingPointError: a final latent is not finite.
            BaseException: what a controller raised; the other clips are given up.
        """
        done: dict[int, Ran] = {}
        plans: dict[int, tuple[Plan, tuple[StepInfo, ...]]] = {}
        packs = self.sampler.packed(
            [job.spec for job in jobs], task=task, anchors=anchors, batch=batch, size=size
        )
        for places, packed in packs:
            network = _Network(self.sampler, packed)
            clips = []
            for index, place in enumerate(places):
                job = jobs[place]
                if job.forwards not in plans:
                    request = _request(packed.clips[index], job.forwards, task, anchors, size)
                    plan = self._family.resolve(self.sampler.pipe, request)
                    plans[job.forwards] = plan, self._family.steps(self.sampler.pipe, plan)
                plan, steps = plans[job.forwards]
                plan = replace(plan, seed=job.spec.seed)
                clips.append(_Clip(index, job.controllers, plan, steps, _layout_of(packed, anchors), network))
            _drive(clips, network)
            for place, clip in zip(places, clips, strict=True):
                sampled = packed.finished(clip.index, clip.rows["video"], clip.rows["audio"])
                done[place] = Ran(sampled=sampled, forwards=clip.forwards, work=tuple(clip.work))
        return [done[place] for place in range(len(jobs))]


def _request(clip: Prepared, forwards: int, task: str, anchors: tuple[str, ...], size: int) -> Request:
    """The request that makes this clip on the pipeline."""
    pictures = [Image.fromarray(image) for image in clip.images]
    keyframes = dict(zip(anchors, pictures, strict=True)) if task == "fl2va" else {}
    references = pictures if task == "ref2va" else []
    return Request(
        prompt=clip.spec.reference_prompt() if task == "ref2va" else clip.spec.caption(),
        task=task,
        references=tuple(Reference(kind="image", image=picture) for picture in references),
        first_frame=keyframes.get("first"),
        last_frame=keyframes.get("last"),
        seed=clip.spec.seed,
        steps=forwards + 1,
        num_frames=clip.spec.frames,
        height=size,
        width=size,
    )


def _layout_of(packed: Packed, anchors: tuple[str, ...]) -> Layout:
    """The batch's layout as a run describes its own."""
    count = len(anchors) or len(packed.clips[0].images)
    edge = packed.edge // 2
    condition = int((packed.layout.conditions // count) ** 0.5) if count else 0
    return h3_layout(
        text_rows=len(packed.layout.text),
        conditions=[[("video", (1, condition, condition))]] * count,
        audio_grid=(2, packed.audio, 1),
        video_grid=(packed.frames, edge, edge),
    )


@dataclass(frozen=True)
class _Question:
    """What a clip waits for. Questions of one key are answered in one batch."""

    key: Hashable
    clip: _Clip
    inputs: Any


class _Clip:
    """One clip's denoise loop, which stands still inside `ask` until the network answers."""

    def __init__(
        self,
        index: int,
        controllers: Mapping[str, Controller],
        plan: Plan,
        steps: tuple[StepInfo, ...],
        layout: Layout,
        network: _Network,
    ) -> None:
        self.index, self.plan, self.steps, self.layout = index, plan, steps, layout
        self.controllers = controllers
        self.id = uuid.uuid4().hex
        self.rows = network.noise(index)
        self.forwards: Counter[str] = Counter()
        self.work: list[float] = []
        self.ask: Callable[[_Question], Any]
        self._device, self._count = network.device, network.count

    def inputs(self, step: StepInfo) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Video rows, audio rows and noise levels `(3,)` of a forward at this step."""
        levels = noise_levels(step.timestep["video"], step.timestep["audio"], device=self._device)
        return self.rows["video"], self.rows["audio"], levels

    @torch.no_grad()  # of a thread, as autocast is
    def denoise(self, ask: Callable[[_Question], Any]) -> None:
        """Every step; `Run._ask` and `Run._corrections` are what this repeats."""
        self.ask = ask
        for step in self.steps:
            for stream, velocity in self._velocity(step).items():
                now, after = step.sigma[stream], step.sigma_next[stream]
                x = self.rows[stream]
                x.copy_(euler(x, velocity, step.timestep[stream], now, after))
            changed: Streams = {}
            for controller in self.controllers.values():
                changed |= controller.after_step(step, self.rows | changed) or {}
            for stream, value in changed.items():
                self.rows[stream].copy_(value)

    def _velocity(self, step: StepInfo) -> Streams:
        ran = 0

        def dense(kind: Kind = "dense") -> Streams:
            nonlocal ran
            ran += 1
            self.forwards[kind] += 1
            return self.ask(_Question(DENSE, self, self.inputs(step)))

        blocks = Blocks(self, step, self._count)
        call = BlockCall(
            request_id=self.id,
            plan=self.plan,
            layout=self.layout,
            step=step,
            branch="cond",
            latents=dict(self.rows),
            controllers=self.controllers,
            dense=dense,
            blocks=blocks,
        )
        velocity = answer(call)
        self.work.append(ran + blocks.run_here / self._count)
        if not ran:
            whole = blocks.run_here >= self._count
            self.forwards["dense" if whole else "reused"] += 1
        if blocks.run_here and (ran or not whole):
            self.forwards["probe"] += 1
        return velocity


class _Network:
    """The transformer, answering a batch's questions."""

    def __init__(self, sampler: Sampler, packed: Packed) -> None:
        self._model, self._packed, self._amp = sampler.transformer, packed, sampler.amp
        self.device = sampler.device
        self.count = len(self._model.transformer_blocks)
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def noise(self, index: int) -> Streams:
        """The first sample of a clip, to be written in place."""
        return {"video": self._packed.video[index].clone(), "audio": self._packed.sound[index].clone()}

    def answers(self, key: Hashable, questions: Sequence[_Question]) -> list[Any]:
        """One answer a question, all from one batched pass, each in memory of its own."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._amp):
            batch = [torch.stack(parts) for parts in zip(*(q.inputs for q in questions), strict=True)]
            if key in (DENSE, ENTER):
                who = torch.tensor([q.clip.index for q in questions], device=self.device)
                video, audio, times = batch
                inputs = (torch.cat([self._packed.kept[who], video], 1), audio, self._packed.text[who], times)
                if key == ENTER:
                    x, context = enter_blocks(self._model, self._packed.layout, *inputs)
                    self._rope = context.cos, context.sin
                    return list(zip(_apart(x), _apart(context.temb), strict=True))
                return _streams(transformer_forward(self._model, self._packed.layout, *inputs))
            x, temb = batch
            assert self._rope is not None  # a clip enters before it goes on
            context = StackContext(temb, *self._rope)
            if key == LEAVE:
                return _streams(leave_blocks(self._model, self._packed.layout, x, context))
            start, stop = key
            return _apart(run_blocks(self._model, self._packed.layout, x, context, start, stop))


def _apart(batch: torch.Tensor) -> list[torch.Tensor]:
    # Clones: a controller that keeps one sample would keep the whole batch alive.
    return [sample.clone() for sample in batch]


def _streams(velocities: tuple[torch.Tensor, torch.Tensor]) -> list[Streams]:
    return [
        {"video": video, "audio": audio}
        for video, audio in zip(*(_apart(part) for part in velocities), strict=True)
    ]


def _drive(clips: Iterable[_Clip], network: _Network) -> None:
    """Run every clip to its end: all to their next question, a batched pass for each kind, and again."""
    workers = {clip.index: Worker(clip.denoise, f"clip-{clip.plan.seed}") for clip in clips}
    try:
        said = {index: worker.resume() for index, worker in workers.items()}
        while True:
            waiting: dict[Hashable, list[_Question]] = defaultdict(list)
            for value in said.values():
                if isinstance(value, Asked):
                    waiting[value.question.key].append(value.question)
            if not waiting:
                return
            said = {}
            for key, questions in waiting.items():
                for question, reply in zip(questions, network.answers(key, questions), strict=True):
                    said[question.clip.index] = workers[question.clip.index].resume(reply)
    finally:
        for worker in workers.values():
            worker.close()
