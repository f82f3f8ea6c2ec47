"""MiniMax-H3 behind the family protocol: joint video and sound, three workflows, one packed sequence.

Runs the stock diffusers blocks stage by stage, in the stock order, so a dense run equals `pipe(...)` bit for
bit. N steps are N-1 forwards, one guidance branch, one expert a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from videoaccel.errors import UserError
from videoaccel.pipelines.checks import check_loaded, check_prompt_embeds
from videoaccel.pipelines.components import Checkpoint
from videoaccel.pipelines.family import BlockStack, Family, ForwardOps, FullSize
from videoaccel.pipelines.fitting import Fitting
from videoaccel.pipelines.h3_blocks import loop_of, workflow_blocks
from videoaccel.pipelines.h3_fitting import H3Fitting
from videoaccel.pipelines.h3_loading import h3_shell, load_h3
from videoaccel.pipelines.h3_ops import h3_forward
from videoaccel.pipelines.h3_random import FULL_SIZE
from videoaccel.pipelines.h3_request import SCHEDULERS, STREAMS, canvas_for, facts_of, resolve
from videoaccel.pipelines.h3_run import MiniMaxH3Run
from videoaccel.pipelines.request import Plan, Reference, Request, StepInfo
from videoaccel.pipelines.schedule import StreamSchedule, stream_schedule

if TYPE_CHECKING:
    from PIL import Image


class MiniMaxH3Family(Family):
    """See `Family`."""

    name: ClassVar[str] = "minimax_h3"
    streams: ClassVar[tuple[str, ...]] = STREAMS

    def load(
        self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, task: str | None
    ) -> Any:
        return load_h3(checkpoint, self.tasks if task is None else (task,), device, dtype)

    def shell(self, checkpoint: Checkpoint) -> Any:
        return h3_shell(checkpoint)

    def full_size(self) -> FullSize:
        return FULL_SIZE

    def forward_ops(self) -> ForwardOps:
        return h3_forward()

    def fittings(self, pipe: Any) -> list[Fitting]:
        names: dict[int, list[str]] = {}
        for name in ("transformer", "transformer_ref"):
            if getattr(pipe, name, None) is not None:
                names.setdefault(id(getattr(pipe, name)), []).append(name)
        return [H3Fitting(tuple(same), getattr(pipe, same[0])) for same in names.values()]

    def sample_request(self, prompt: str, picture: Image.Image, task: str | None = None) -> Request:
        references = (Reference(kind="image", image=picture),) if task == "ref2va" else ()
        first_frame = picture if task == "fl2va" else None
        return Request(prompt=prompt, task=task, references=references, first_frame=first_frame)

    def decodes(self, pipe: Any) -> bool:
        return getattr(pipe, "vae", None) is not None and getattr(pipe, "audio_vae", None) is not None

    def components(self, pipe: Any, task: str) -> tuple[str, ...]:
        blocks = workflow_blocks(pipe, task)
        component: str = loop_of(blocks)[1].sub_blocks["denoiser"].transformer_name
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
            for stream, name in SCHEDULERS.items()
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
        (transformer,) = self.components(pipe, plan.task)
        needed = [transformer]
        needed += [] if prompt_embeds is not None else ["text_encoder", "tokenizer", "processor"]
        needed += ["vae"] if decode or plan.task != "t2va" else []
        needed += ["audio_vae"] if decode or any(r.audio is not None for r in request.references) else []
        check_loaded(pipe, plan.task, needed, f"load(..., task={plan.task!r})")
        check_prompt_embeds(prompt_embeds, getattr(pipe, transformer))
        return MiniMaxH3Run(pipe, request, plan, self.steps(pipe, plan), prompt_embeds)
