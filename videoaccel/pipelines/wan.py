"""Wan 2.1 and 2.2 behind the family protocol: text or image to video, guidance, one or two experts.

The denoise stage is the stock pipeline's own `__call__` on a shallow copy of the pipeline, handed what the
encode stage made, so a dense run equals `pipe(...)` bit for bit. N steps are N forwards a guidance branch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.checks import check_loaded, check_prompt_embeds
from videoaccel.pipelines.components import Checkpoint
from videoaccel.pipelines.family import BlockStack, Family, ForwardOps
from videoaccel.pipelines.request import Plan, Request, StepInfo
from videoaccel.pipelines.schedule import StreamSchedule, stream_schedule
from videoaccel.pipelines.wan_facts import STREAMS, TEXT_ROWS, canvas_for, experts
from videoaccel.pipelines.wan_loading import load_wan
from videoaccel.pipelines.wan_ops import wan_forward
from videoaccel.pipelines.wan_request import resolve
from videoaccel.pipelines.wan_run import WanRun

if TYPE_CHECKING:
    from PIL import Image


class WanFamily(Family):
    """See `Family`."""

    name: ClassVar[str] = "wan"
    streams: ClassVar[tuple[str, ...]] = STREAMS

    def load(
        self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, task: str | None
    ) -> Any:
        return load_wan(checkpoint, device, dtype, task)

    def forward_ops(self) -> ForwardOps:
        return wan_forward()

    def sample_request(self, prompt: str, picture: Image.Image, task: str | None = None) -> Request:
        return Request(prompt=prompt, task=task, first_frame=picture if task == "i2v" else None)

    def components(self, pipe: Any, task: str) -> tuple[str, ...]:
        return experts(pipe, task)

    def stack(self, pipe: Any, component: str) -> BlockStack:
        model = getattr(pipe, component, None)
        if model is None:
            raise UserError(f"component {component} is not loaded; load the whole checkpoint")
        config = model.config
        return BlockStack(
            component=component,
            model=model,
            blocks=model.blocks,
            path="blocks",
            attention="attn1",
            inputs=("hidden_states", "encoder_hidden_states", "temb", "rotary_emb"),
            outputs=("hidden_states",),
            num_heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            hidden_size=config.num_attention_heads * config.attention_head_dim,
            velocity_streams=("video",),
        )

    def resolve(self, pipe: Any, request: Request) -> Plan:
        return resolve(pipe, request, TEXT_ROWS)

    def schedules(
        self,
        pipe: Any,
        steps: int,
        *,
        shift: Mapping[str, float] | None = None,
        sigmas: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, StreamSchedule]:
        video_shift, video_sigmas = (shift or {}).get("video"), (sigmas or {}).get("video")
        return {"video": stream_schedule(pipe.scheduler, steps, shift=video_shift, sigmas=video_sigmas)}

    def canvas(self, pipe: Any, short_edge: int | None = None) -> tuple[int, int]:
        return canvas_for(pipe, short_edge)

    def steps(self, pipe: Any, plan: Plan) -> tuple[StepInfo, ...]:
        schedules = self.schedules(pipe, plan.steps, shift=plan.shift, sigmas=plan.sigmas)
        schedule = schedules["video"]
        ratio = pipe.config.boundary_ratio
        boundary = None if ratio is None else ratio * pipe.scheduler.config.num_train_timesteps
        steps = []
        for index, timestep in enumerate(schedule.timesteps):
            first = boundary is None or timestep >= boundary
            scale = plan.guidance if first else plan.guidance_low_noise
            guided = plan.guidance is not None and plan.guidance > 1 and scale is not None
            weight = float(scale) if guided and scale is not None else 1.0
            steps.append(
                StepInfo(
                    index=index,
                    component="transformer" if first else "transformer_2",
                    timestep={"video": timestep},
                    sigma={"video": schedule.sigmas[index]},
                    sigma_next={"video": schedule.sigmas[index + 1]},
                    branches={"cond": weight, "uncond": 1.0 - weight} if guided else {"cond": 1.0},
                    schedules=schedules,
                )
            )
        return tuple(steps)

    def start(
        self, pipe: Any, request: Request, *, prompt_embeds: torch.Tensor | None = None, decode: bool = True
    ) -> WanRun:
        plan = self.resolve(pipe, request)
        steps = self.steps(pipe, plan)
        needed = sorted({step.component for step in steps})
        transformer = needed[0]  # a second expert reads text of the same width
        # Embeddings stand for the prompt alone; the branch without it is encoded here.
        if prompt_embeds is None or "uncond" in steps[0].branches:
            needed += ["text_encoder", "tokenizer"]
            # diffusers' image-to-video pipeline cleans prompts with it without asking whether it is there.
            if plan.task == "i2v" and importlib.util.find_spec("ftfy") is None:
                raise UserError("task i2v needs the ftfy package; pip install ftfy")
        if decode or plan.task == "i2v":
            needed.append("vae")
        model = pipe.transformer
        if plan.task == "i2v" and model is not None and model.config.image_dim is not None:
            needed += ["image_encoder", "image_processor"]
        check_loaded(pipe, plan.task, needed, "load the whole checkpoint")
        check_prompt_embeds(prompt_embeds, getattr(pipe, transformer))
        return WanRun(pipe, request, plan, steps, prompt_embeds)
