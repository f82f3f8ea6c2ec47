"""MiniMax-H3 behind the family protocol: joint video and sound, three workflows, one packed sequence.

Runs the stock diffusers blocks stage by stage, in the stock order, so a dense run equals `pipe(...)` bit for
bit. N steps are N-1 forwards, one guidance branch, one expert a task.
"""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from videoaccel.errors import RequestError, UserError, unknown
from videoaccel.forward import Controller
from videoaccel.pipelines.checks import check_loaded, check_prompt_embeds
from videoaccel.pipelines.family import NO_CONTROLLERS, BlockStack, Family, Run
from videoaccel.pipelines.h3_layout import Condition, h3_layout
from videoaccel.pipelines.h3_request import STREAMS, TASKS, canvas_for, facts_of, resampled, resolve
from videoaccel.pipelines.layout import Layout
from videoaccel.pipelines.request import (
    NOT_FINITE,
    CancelFlag,
    Clip,
    OnProgress,
    Plan,
    Reference,
    Request,
    StepInfo,
    Streams,
    finished_frames,
)
from videoaccel.pipelines.schedule import StreamSchedule, own_scheduler, stream_schedule
from videoaccel.pipelines.stand_in import looped

# The block a workflow cannot run without: how a pruned pipeline shows which task it kept.
_MARKERS = {
    "t2va": "MiniMaxH3NoKeyframeAnchorsStep",
    "fl2va": "MiniMaxH3ResizeStep",
    "ref2va": "MiniMaxH3Ref2VASetupStep",
}
_SCHEDULERS = {"video": "scheduler", "audio": "audio_scheduler"}
_TRIGGERS: dict[str, dict[str, bool]] = {"t2va": {}, "fl2va": {"image": True}, "ref2va": {"references": True}}


class MiniMaxH3Family(Family):
    """See `Family`."""

    name: ClassVar[str] = "minimax_h3"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("MiniMaxH3ModularPipeline",)
    tasks: ClassVar[tuple[str, ...]] = TASKS
    streams: ClassVar[tuple[str, ...]] = STREAMS

    def components(self, pipe: Any, task: str) -> tuple[str, ...]:
        blocks = workflow_blocks(pipe, task)
        component: str = _loop(blocks)[1].sub_blocks["denoiser"].transformer_name
        return (component,)

    def stack(self, pipe: Any, component: str) -> BlockStack:
        model = getattr(pipe, component, None)
        if model is None:
            raise UserError(f"component {component} is not loaded; load the model for the task that uses it")
        config = model.config
        return BlockStack(
            component=component,
            model=model,
            blocks=model.transformer_blocks,
            path="transformer_blocks",
            attention="attn",
            inputs=("hidden_states", "temb", "adaln_indices", "rotary_emb"),
            outputs=("hidden_states",),
            num_heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            hidden_size=config.hidden_size,
            velocity_streams=("video", "audio"),
        )

    def resolve(self, pipe: Any, request: Request) -> Plan:
        def forwards(steps: int, shift: Mapping[str, float], sigmas: Mapping[str, tuple[float, ...]]) -> int:
            return len(self.schedules(pipe, steps, shift=shift, sigmas=sigmas)["video"].timesteps)

        return resolve(pipe, request, forwards)

    def schedules(
        self,
        pipe: Any,
        steps: int,
        *,
        shift: Mapping[str, float] | None = None,
        sigmas: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, StreamSchedule]:
        found = {
            stream: stream_schedule(
                getattr(pipe, name),
                steps,
                shift=(shift or {}).get(stream),
                sigmas=(sigmas or {}).get(stream),
            )
            for stream, name in _SCHEDULERS.items()
        }
        counts = {name: len(schedule.timesteps) for name, schedule in found.items()}
        if counts["video"] != counts["audio"]:
            raise UserError(
                f"the video and audio schedules have {counts} steps; use fewer steps or other sigmas"
            )
        return found

    def canvas(self, pipe: Any, short_edge: int | None = None) -> tuple[int, int]:
        return canvas_for(pipe, short_edge)

    def trained(self, pipe: Any) -> bool:
        return facts_of(pipe).trained

    def steps(self, pipe: Any, plan: Plan) -> tuple[StepInfo, ...]:
        schedules = self.schedules(pipe, plan.steps, shift=plan.shift, sigmas=plan.sigmas)
        (component,) = self.components(pipe, plan.task)
        return tuple(
            StepInfo(
                index=index,
                component=component,
                timestep={name: schedule.timesteps[index] for name, schedule in schedules.items()},
                sigma={name: schedule.sigmas[index] for name, schedule in schedules.items()},
                sigma_next={name: schedule.sigmas[index + 1] for name, schedule in schedules.items()},
                branches={"cond": 1.0},
                schedules=schedules,
            )
            for index in range(plan.forwards)
        )

    def start(
        self, pipe: Any, request: Request, *, prompt_embeds: torch.Tensor | None = None, decode: bool = True
    ) -> MiniMaxH3Run:
        plan = self.resolve(pipe, request)
        needed = list(self.components(pipe, plan.task))
        needed += [] if prompt_embeds is not None else ["text_encoder", "tokenizer", "processor"]
        needed += ["vae"] if decode or plan.task != "t2va" else []
        needed += ["audio_vae"] if decode or any(r.audio is not None for r in request.references) else []
        check_loaded(pipe, plan.task, needed, f"load(..., task={plan.task!r})")
        check_prompt_embeds(prompt_embeds, getattr(pipe, needed[0]))
        return MiniMaxH3Run(pipe, request, plan, self.steps(pipe, plan), prompt_embeds)


class MiniMaxH3Run(Run):
    """One H3 request: the stock blocks of its workflow over one `PipelineState` of its own."""

    def __init__(
        self,
        pipe: Any,
        request: Request,
        plan: Plan,
        steps: tuple[StepInfo, ...],
        prompt_embeds: torch.Tensor | None = None,
    ) -> None:
        super().__init__(pipe, request, plan, steps)
        # The blocks step `components.scheduler` in place. A shallow copy of the pipeline with schedulers of
        # its own keeps two runs of one pipeline apart, and the pipeline as it was.
        self._view = copy.copy(pipe)
        for stream, name in _SCHEDULERS.items():
            shift, sigmas = plan.shift.get(stream), plan.sigmas.get(stream)
            setattr(self._view, name, own_scheduler(getattr(pipe, name), shift=shift, sigmas=sigmas))
        self._blocks = workflow_blocks(pipe, plan.task)
        self._state = _initial_state(pipe, self._inputs())
        if prompt_embeds is not None:
            del self._blocks["text_encoder"]
            self._state.set("prompt_embeds", prompt_embeds.to(pipe._execution_device))
            tags = torch.full((prompt_embeds.shape[1],), pipe.text_tag, dtype=torch.long)
            self._state.set("text_token_tags", tags)
        self._layout: Layout | None = None
        self._noise: Streams = {}
        self._skip: dict[str, int] = {}  # condition rows in front of the generated ones, from denoise() on

    def _inputs(self) -> dict[str, Any]:
        request, plan = self.request, self.plan
        values: dict[str, Any] = {
            "prompt": request.prompt,
            "height": plan.height,
            "width": plan.width,
            "num_frames": plan.num_frames,
            "num_inference_steps": plan.steps,
            "generator": torch.Generator("cpu").manual_seed(plan.seed),
            "output_type": "np",
        }
        if plan.task == "fl2va":
            for name, image in (("image", request.first_frame), ("last_image", request.last_frame)):
                values[name] = None if image is None else image.convert("RGB")
        if plan.task == "ref2va":
            values["references"] = [
                stock_reference(resampled(self.pipe, reference)) for reference in request.references
            ]
        return values

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise RuntimeError("The layout is known after encode().")
        return self._layout

    @property
    def initial_noise(self) -> Streams:
        return self._noise

    @property
    def latents(self) -> Streams:
        return {"video": self._state.get("latents"), "audio": self._state.get("audio_latents")}

    @torch.no_grad()
    def encode(self) -> None:
        self._enter("encode")
        self._synchronise()
        start = time.perf_counter()
        for name, block in self._blocks.items():
            if name == _loop(self._blocks)[0]:
                break
            _, self._state = block(self._view, self._state)
        self._layout = _layout_of(self._state, self._view)
        self._noise = {name: value.cpu().clone() for name, value in self._unpacked().items()}
        self._synchronise()
        self.timings.encode_s = time.perf_counter() - start

    def _unpacked(self) -> Streams:
        """The generated rows of the loop's buffers as latents, through the stock block that unpacks them."""
        from diffusers.modular_pipelines.modular_pipeline import PipelineState

        state = PipelineState(values=dict(self._state.values))
        _after(self._blocks)(self._view, state)
        return {"video": state.get("latents"), "audio": state.get("audio_latents")}

    @torch.no_grad()
    def denoise(
        self,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        controllers: Mapping[str, Controller] = NO_CONTROLLERS,
    ) -> None:
        self._enter("denoise")
        self.controllers = controllers
        loop = _loop(self._blocks)[1]
        state = loop.get_block_state(self._state)
        view = looped(self._view, (self.steps[0].component,), self._forward)
        self._skip = {"video": state.num_condition_video_rows, "audio": state.num_condition_audio_rows}
        self._synchronise()
        start = time.perf_counter()
        for step, timestep in zip(self.steps, state.timesteps, strict=True):
            self._check(cancel)
            begun = time.perf_counter()
            loop.loop_step(view, state, i=step.index, t=timestep)
            buffers = {"video": state.latents, "audio": state.audio_latents}
            generated = {name: buffer[self._skip[name] :] for name, buffer in buffers.items()}
            for name, value in self._corrections(step, generated).items():
                generated[name].copy_(value)
            # Without this a GPU runs steps behind its launches, and a cancel would stop nothing.
            self._synchronise()
            self.timings.step_s.append(time.perf_counter() - begun)
            self._tell(
                on_progress, "denoise", step.index + 1, len(self.steps), step_s=self.timings.step_s[-1]
            )
        loop.set_block_state(self._state, state)
        _after(self._blocks)(self._view, self._state)
        self._synchronise()
        self.timings.denoise_s = time.perf_counter() - start

    def _forward(self, model: Any, branch: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        skip = self._skip
        whole: Streams = {}
        made: Streams = {}

        def run_model() -> Streams:
            whole["video"], whole["audio"] = model(**inputs)
            made.update({name: value[0, skip[name] :] for name, value in whole.items()})
            return dict(made)

        samples = {"video": inputs["hidden_states"], "audio": inputs["audio_hidden_states"]}
        latents = {name: value[0, skip[name] :] for name, value in samples.items()}
        velocity = self._ask(branch, latents, run_model)
        return tuple(
            whole[name]
            if value is made.get(name)
            # The scheduler reads the generated rows only; the condition rows in front are never used.
            else torch.cat([value.new_zeros(skip[name], value.shape[-1]), value])[None]
            for name, value in ((stream, velocity[stream]) for stream in STREAMS)
        )

    def stock_call(self) -> float | None:
        # The stock loop draws a bar on stderr; the run's view of the pipeline has schedulers of its own.
        with contextlib.redirect_stderr(io.StringIO()):
            return self._timed(lambda: self._view(**self._inputs()))

    @torch.no_grad()
    def stock_loop(self) -> float | None:
        loop = _loop(self._blocks)[1]
        loop.set_progress_bar_config(disable=True)
        return self._timed(lambda: loop(self._view, self._state))

    @torch.no_grad()
    def decode(self) -> Clip:
        self._enter("decode")
        self._synchronise()
        start = time.perf_counter()
        for block in (block for name, block in self._blocks.items() if name.startswith("decode")):
            _, self._state = block(self._view, self._state)
        frames = finished_frames(self._state.get("videos")[0])
        # The run outlives its clip where a caller keeps it; the float frames are four times the clip's size.
        self._state.set("videos", None)
        audio = self._state.get("audio")[0].float().cpu().numpy()
        if not np.isfinite(audio).all():
            raise RequestError(
                f"the decoded sound holds values that are not finite; no clip was made: {NOT_FINITE}"
            )
        self._synchronise()
        self.timings.decode_s = time.perf_counter() - start
        return self._clip(frames, audio, int(self._state.get("sampling_rate")))


def workflow_blocks(pipe: Any, task: str) -> dict[str, Any]:
    """The stock leaf blocks of a task's workflow, in order, by name.

    Raises:
        UserError: an unknown task, or a pipeline that was pruned to another workflow.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    blocks: dict[str, Any] = dict(pipe.blocks.get_execution_blocks(**_TRIGGERS[task]).sub_blocks)
    names = {base.__name__ for block in blocks.values() for base in type(block).__mro__}
    if _MARKERS[task] not in names:
        raise UserError(f"this pipeline was loaded for another workflow; load it with workflow={task!r}")
    return blocks


def stock_reference(reference: Reference) -> Any:
    """A `Reference` as the dataclass diffusers takes."""
    from diffusers.modular_pipelines.minimax_h3 import (
        MiniMaxH3AudioReference,
        MiniMaxH3ImageReference,
        MiniMaxH3VideoReference,
    )

    if reference.kind == "image":
        return MiniMaxH3ImageReference(
            image=None if reference.image is None else reference.image.convert("RGB")
        )
    if reference.kind == "video":
        return MiniMaxH3VideoReference(
            frames=reference.frames,
            fps=reference.fps,
            audio=reference.audio,
            sample_rate=reference.sample_rate,
        )
    return MiniMaxH3AudioReference(audio=reference.audio, sample_rate=reference.sample_rate)


def _loop(blocks: Mapping[str, Any]) -> tuple[str, Any]:
    return next((name, block) for name, block in blocks.items() if hasattr(block, "loop_step"))


def _after(blocks: Mapping[str, Any]) -> Any:
    names = list(blocks)
    return blocks[names[names.index(_loop(blocks)[0]) + 1]]


def _initial_state(pipe: Any, inputs: dict[str, Any]) -> Any:
    """The state `ModularPipeline.__call__` would start from: the inputs, and the blocks' own defaults."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state = PipelineState()
    for parameter in pipe.blocks.inputs:
        value = inputs.get(parameter.name, parameter.default)
        if parameter.name is not None:
            state.set(parameter.name, value, parameter.kwargs_type)
    return state


def _layout_of(state: Any, pipe: Any) -> Layout:
    """The layout of the encoded request, from the tensors its condition rows were packed from."""
    _, patch_h, patch_w = pipe.patch_size

    def grid(frames: int, height: int, width: int) -> tuple[int, int, int]:
        return frames, height // patch_h, width // patch_w

    visual = iter(state.get("condition_latents") or ())
    sound = iter(state.get("audio_condition_latents") or ())
    conditions: list[list[Condition]] = []
    for reference in state.get("normalized_references") or state.get("keyframes") or ():
        blocks: list[Condition] = []
        if getattr(reference, "has_audio", False):
            blocks.append(("audio", (pipe.audio_channels, len(next(sound)) // pipe.audio_channels, 1)))
        if getattr(reference, "kind", "image") != "audio":
            blocks.append(("video", grid(*next(visual).shape[2:5])))
        conditions.append(blocks)
    return h3_layout(
        text_rows=int(state.get("text_indices").numel()),
        conditions=conditions,
        audio_grid=(pipe.audio_channels, int(state.get("num_audio_latents")), 1),
        video_grid=grid(
            state.get("num_latent_frames"), state.get("latent_height"), state.get("latent_width")
        ),
    )
