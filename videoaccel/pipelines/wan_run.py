"""One Wan request, stage by stage, on a shallow copy of the stock pipeline."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch

from videoaccel.forward import Controller
from videoaccel.pipelines.layout import Layout, Segment
from videoaccel.pipelines.request import (
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
from videoaccel.pipelines.stand_in import looped, put
from videoaccel.pipelines.wan_facts import TEXT_ROWS, patch_size


class WanRun(Run):
    """One Wan request, on a shallow copy of the pipeline with a scheduler of its own."""

    def __init__(
        self,
        pipe: Any,
        request: Request,
        plan: Plan,
        steps: tuple[StepInfo, ...],
        prompt_embeds: torch.Tensor | None = None,
    ) -> None:
        super().__init__(pipe, request, plan, steps)
        self._view = copy.copy(pipe)
        shift, sigmas = plan.shift.get("video"), plan.sigmas.get("video")
        put(self._view, "scheduler", own_scheduler(pipe.scheduler, shift=shift, sigmas=sigmas))
        # The Wan VAE keeps the feature cache of the clip at hand in its own attributes. A shallow copy has
        # the same weights, and attributes of its own.
        put(self._view, "vae", copy.copy(pipe.vae))
        put(self._view, "_progress_bar_config", {"disable": True})
        self._embeds: dict[str, Any] = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": None}
        self._latents: torch.Tensor | None = None
        self._noise: Streams = {}

    @property
    def layout(self) -> Layout:
        pipe, plan = self.pipe, self.plan
        _, patch_h, patch_w = patch_size(pipe)
        frames = (plan.num_frames - 1) // pipe.vae_scale_factor_temporal + 1
        spatial = pipe.vae_scale_factor_spatial
        grid = (frames, plan.height // spatial // patch_h, plan.width // spatial // patch_w)
        embeds = self._embeds["prompt_embeds"]
        cross = TEXT_ROWS if embeds is None else embeds.shape[1]
        rows = grid[0] * grid[1] * grid[2]
        segment = Segment(role="video", modality="video", start=0, stop=rows, grid=grid)
        return Layout(segments=(segment,), cross_rows=cross)

    @property
    def initial_noise(self) -> Streams:
        return self._noise

    @property
    def latents(self) -> Streams:
        if self._latents is None:
            raise RuntimeError("The latents are known after encode().")
        return {"video": self._latents}

    @torch.no_grad()
    def encode(self) -> None:
        self._enter("encode")
        self._synchronise()
        start = time.perf_counter()
        view, request, plan = self._view, self.request, self.plan
        device = view._execution_device
        guided = "uncond" in self.steps[0].branches
        positive, negative = view.encode_prompt(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=guided,
            prompt_embeds=self._embeds["prompt_embeds"],
            max_sequence_length=TEXT_ROWS,
            device=device,
        )
        self._embeds = {"prompt_embeds": positive, "negative_prompt_embeds": negative}
        generator = torch.Generator("cpu").manual_seed(plan.seed)
        shape = (plan.height, plan.width, plan.num_frames, torch.float32, device, generator)
        if plan.task == "t2v":
            model = view.transformer if view.transformer is not None else view.transformer_2
            prepared = view.prepare_latents(1, model.config.in_channels, *shape)
            noise = prepared
        else:
            images = [image for image in (request.first_frame, request.last_frame) if image is not None]
            if view.transformer is not None and view.transformer.config.image_dim is not None:
                embeds = view.encode_image(images[0] if len(images) == 1 else images, device)
                put(view, "encode_image", lambda *_: embeds)
            pixels = [
                view.video_processor.preprocess(image, height=plan.height, width=plan.width).to(
                    device, torch.float32
                )
                for image in images
            ]
            last = pixels[1] if len(pixels) == 2 else None
            prepared = view.prepare_latents(pixels[0], 1, view.vae.config.z_dim, *shape, None, last)
            noise = prepared[0]
        # The stock loop takes its start from here instead of drawing (and encoding) again.
        put(view, "prepare_latents", lambda *_: prepared)
        self._latents = noise
        self._noise = {"video": noise.cpu().clone()}
        self._synchronise()
        self.timings.encode_s = time.perf_counter() - start

    @torch.no_grad()
    def denoise(
        self,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelFlag | None = None,
        controllers: Mapping[str, Controller] = NO_CONTROLLERS,
    ) -> None:
        self._enter("denoise")
        self._check(cancel)
        self.controllers = controllers
        view = looped(self._view, ("transformer", "transformer_2"), self._forward)
        self._synchronise()
        start = begun = time.perf_counter()

        def step_end(_: Any, index: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal begun
            self._latents = tensors["latents"]
            self._latents = self._corrections(self.steps[index], self.latents).get("video", self._latents)
            self._synchronise()
            self.timings.step_s.append(time.perf_counter() - begun)
            self._tell(on_progress, "denoise", index + 1, len(self.steps), step_s=self.timings.step_s[-1])
            if index + 1 < len(self.steps):
                self._check(cancel)
            begun = time.perf_counter()
            return {"latents": self._latents}

        # The timing starts at the loop, after the stock call's own input checks.
        output = view(**self._inputs(), **self._embeds, output_type="latent", callback_on_step_end=step_end)
        self._latents = output.frames
        self._synchronise()
        self.timings.denoise_s = time.perf_counter() - start

    def _inputs(self) -> dict[str, Any]:
        """What the stock call is told of the request, text and noise left out."""
        plan = self.plan
        inputs: dict[str, Any] = {
            "height": plan.height,
            "width": plan.width,
            "num_frames": plan.num_frames,
            "num_inference_steps": plan.steps,
            "guidance_scale": plan.guidance,
            "max_sequence_length": TEXT_ROWS,
        }
        if plan.task == "i2v":
            inputs |= {"image": self.request.first_frame, "last_image": self.request.last_frame}
        if self._view.config.boundary_ratio is not None:
            inputs["guidance_scale_2"] = plan.guidance_low_noise
        return inputs

    def _forward(self, model: Any, branch: str, inputs: dict[str, Any]) -> tuple[torch.Tensor]:
        velocity = self._ask(branch, self.latents, lambda: {"video": model(**inputs)[0]})
        return (velocity["video"],)

    def stock_call(self) -> float | None:
        request = self.request
        text: dict[str, Any] = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
        if self._embeds["prompt_embeds"] is not None:
            text |= {"prompt": None, "prompt_embeds": self._embeds["prompt_embeds"]}
        generator = torch.Generator("cpu").manual_seed(self.plan.seed)
        inputs = self._inputs() | text
        return self._timed(lambda: self._view(**inputs, generator=generator, output_type="np"))

    def stock_loop(self) -> float | None:
        inputs = self._inputs() | self._embeds
        return self._timed(lambda: self._view(**inputs, output_type="latent"))

    @torch.no_grad()
    def decode(self) -> Clip:
        self._enter("decode")
        self._synchronise()
        start = time.perf_counter()
        view = self._view
        latents = self.latents["video"].to(view._execution_device, dtype=view.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (view.vae.config.latents_mean, view.vae.config.latents_std)
        )
        # As the stock call: divide by the inverse, so that the rounding is the same.
        latents = latents / (1.0 / std).to(latents) + mean.to(latents)
        video = view.vae.decode(latents, return_dict=False)[0]
        frames = finished_frames(view.video_processor.postprocess_video(video, output_type="np")[0])
        self._synchronise()
        self.timings.decode_s = time.perf_counter() - start
        return self._clip(frames, None, None)
