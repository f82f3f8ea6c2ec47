"""One MiniMax-H3 request, stage by stage through the stock diffusers blocks, in the stock order."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from videoaccel.errors import RequestError
from videoaccel.forward import Controller
from videoaccel.pipelines.h3_blocks import (
    block_after_loop,
    initial_state,
    layout_of,
    loop_of,
    stock_reference,
    workflow_blocks,
)
from videoaccel.pipelines.h3_request import SCHEDULERS, STREAMS, resampled
from videoaccel.pipelines.layout import Layout
from videoaccel.pipelines.request import (
    NOT_FINITE,
    CancelFlag,
    Clip,
    OnProgress,
    Plan,
    Request,
    StepInfo,
    Streams,
    finished_frames,
)
from videoaccel.pipelines.run import NO_CONTROLLERS, Run
from videoaccel.pipelines.schedule import own_scheduler
from videoaccel.pipelines.stand_in import looped


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
        for stream, name in SCHEDULERS.items():
            shift, sigmas = plan.shift.get(stream), plan.sigmas.get(stream)
            setattr(self._view, name, own_scheduler(getattr(pipe, name), shift=shift, sigmas=sigmas))
        self._blocks = workflow_blocks(pipe, plan.task)
        self._state = initial_state(pipe, self._inputs())
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

    @property
    def timestep_plan(self) -> list[torch.Tensor]:
        """Per step, the distinct timesteps that its forward is passed, `(N,)`; after `encode`."""
        return [timesteps for timesteps, _ in self._state.get("row_timestep_plan")]

    @torch.no_grad()
    def encode(self) -> None:
        self._enter("encode")
        self._synchronise()
        start = time.perf_counter()
        for name, block in self._blocks.items():
            if name == loop_of(self._blocks)[0]:
                break
            _, self._state = block(self._view, self._state)
        self._layout = layout_of(self._state, self._view)
        self._noise = {name: value.cpu().clone() for name, value in self._unpacked().items()}
        self._synchronise()
        self.timings.encode_s = time.perf_counter() - start

    def _unpacked(self) -> Streams:
        """The generated rows of the loop's buffers as latents, through the stock block that unpacks them."""
        from diffusers.modular_pipelines.modular_pipeline import PipelineState

        state = PipelineState(values=dict(self._state.values))
        block_after_loop(self._blocks)(self._view, state)
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
        loop = loop_of(self._blocks)[1]
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
        block_after_loop(self._blocks)(self._view, self._state)
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
        loop = loop_of(self._blocks)[1]
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
