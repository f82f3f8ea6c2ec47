"""Trains tiny-h3's transformer and text encoder on all three workflows at once, then distils guidance in.

    python -m training.dit train --seconds 480 --codec DIR --out DIR [--resume DIR] [--optimizers adamw,muon]
    python -m training.dit distill --seconds 240 --codec DIR --resume DIR --out DIR --guidance 4

Both write the averaged weights of `transformer` and `text_encoder` (see common.save_half) and a log.
`--codec` and `--resume` also take an exported model's folder, such as videoaccel/assets/tiny-h3.
"""

import argparse
import copy
import math
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

from evals.batched import block_forward
from training.batches import TASKS, Batch, Batcher, add_noise, draw_sigmas, predict
from training.cartoon import CHANNELS, covered_rows, readout
from training.common import (
    Budget,
    Log,
    descend,
    latent_statistics,
    load_into,
    mixed_optimizers,
    save_half,
    scale_rates,
)
from training.latents import Codec, Latents, build_latents, digest, keep_latents
from training.losses import Drawn, Teacher, flow_loss, guided_loss, stream_errors
from training.parallel import Ranks
from training.skeleton import AUDIO_VAE, TRANSFORMER, VIDEO_VAE, build_models, build_tokenizer

SHIPPED = ("transformer", "text_encoder")  # of what is trained here; the cartoon's head stays behind
CARTOON_WEIGHT = 0.5
DRAWN_WEIGHT = 0.3
TASK_SHARES = (0.62, 0.2, 0.18)
ANCHORS = (("first",), ("last",), ("first", "last"))
AUDIO_WEIGHT = 0.25
LONG_SHARE = 0.12
SHORT_SHARE = 0.35
SHORT_SCALE = 5  # clips in a batch of windows for one in a batch of whole clips: about as many rows


def load_codec(folder: Path, device: torch.device) -> Codec:
    """The trained VAEs of a folder that video_vae.py and audio_vae.py wrote, or of an exported model."""
    names = ("vae", "audio_vae")
    statistics = [latent_statistics(folder, name) for name in names]
    vae = AutoencoderKLMiniMaxH3(**{**VIDEO_VAE, **statistics[0]})
    audio = AutoencoderKLMiniMaxH3Audio(**{**AUDIO_VAE, **statistics[1]})
    for model, name in zip((vae, audio), names, strict=True):
        load_into(model, folder, name)
        model.to(device).eval().requires_grad_(False)
    vae.use_tiling = False
    return Codec(vae, audio)


def load_networks(folder: Path | None, device: torch.device) -> torch.nn.ModuleDict:
    """Transformer and text encoder, and training's own head for the cartoon; fresh or from a folder."""
    built = build_models(1)
    networks = torch.nn.ModuleDict({name: built[name] for name in SHIPPED})
    networks["cartoon"] = torch.nn.Linear(TRANSFORMER["hidden_size"], CHANNELS)
    torch.nn.init.zeros_(networks["cartoon"].weight)
    if folder is None:
        # A calm start: no block, and no head, changes anything yet.
        for block in networks["transformer"].transformer_blocks:
            torch.nn.init.zeros_(block.adaln_proj.linear.weight)
            torch.nn.init.zeros_(block.adaln_proj.linear.bias)
        for head in (networks["transformer"].proj_out, networks["transformer"].audio_proj_out):
            torch.nn.init.zeros_(head.weight)
            torch.nn.init.zeros_(head.bias)
    else:
        for name, network in networks.items():
            if name != "cartoon" or (folder / "cartoon.0.safetensors").exists():
                load_into(network, folder, name)
    return networks.to(device)


def optimizers_of(networks: torch.nn.ModuleDict, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    """`adamw` for everything, or `muon` for the matrices of the transformer's blocks."""
    transformer = networks["transformer"]
    stacks = [*transformer.transformer_blocks, *transformer.token_refiner.refiner_blocks]
    matrices = [
        p for stack in stacks for name, p in stack.named_parameters() if p.ndim == 2 and "adaln" not in name
    ]
    return mixed_optimizers(networks, matrices if kind == "muon" else [], lr)


class Average:
    """Exponential moving average of weights, with a short memory at first."""

    def __init__(self, networks: torch.nn.ModuleDict, decay: float = 0.998) -> None:
        self.shadow = copy.deepcopy(networks).requires_grad_(False)
        self.decay, self.count = decay, 0

    @torch.no_grad()
    def update(self, networks: torch.nn.ModuleDict) -> None:
        self.count += 1
        decay = min(self.decay, self.count / (10 + self.count))
        torch._foreach_lerp_(list(self.shadow.parameters()), list(networks.parameters()), 1 - decay)


def draw_batch(batchers: dict[str, Batcher], size: int, chooser: torch.Generator) -> Batch:
    """A random task, now and then on long clips or on windows, at about the same number of rows.

    Windows have no keyframes of their own, so they are drawn for the other two tasks.
    """
    luck = float(torch.rand((), generator=chooser))
    task = TASKS[int(torch.multinomial(torch.tensor(TASK_SHARES), 1, generator=chooser))]
    anchors = ANCHORS[int(torch.randint(len(ANCHORS), (), generator=chooser))] if task == "fl2va" else ()
    if "long" in batchers and luck < LONG_SHARE:
        return batchers["long"].draw(task, max(1, size // 3), anchors)
    if luck > 1 - SHORT_SHARE and task != "fl2va":
        return batchers["short"].draw(task, SHORT_SCALE * size)
    return batchers["whole"].draw(task, size, anchors)


@torch.no_grad()
def validate(networks, batcher: Batcher, blank: int, amp: bool) -> dict[str, float]:
    """Loss on fixed unseen clips, noise and levels; not compiled, which would take longer than it saves."""
    device = batcher.device
    state = torch.get_rng_state(), (torch.cuda.get_rng_state() if device.type == "cuda" else None)
    torch.manual_seed(1234)
    rows: dict[str, list[float]] = {"video": [], "audio": [], "object": []}
    for _ in range(4):
        batch = batcher.draw("t2va", 64)
        noisy = add_noise(batch, draw_sigmas(64, device))
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            video, audio = predict(networks, batch, batch.token_ids, noisy, block_forward)
        targets = (noisy.video_target, noisy.audio_target)
        errors = stream_errors((video, audio), targets, torch.ones_like(video[..., 0]))
        covered = covered_rows(batch.cartoon)
        errors["object"] = stream_errors((video, audio), targets, covered / covered.mean())["video"]
        for name, error in errors.items():
            rows[name].append(float(error))
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    return {f"val_{name}": sum(values) / len(values) for name, values in rows.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("train", "distill"))
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=32000)
    parser.add_argument("--long-clips", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--decay-share", type=float, default=0.25, help="last share of the run in which lr falls to 0"
    )
    parser.add_argument(
        "--optimizers", default="muon", help="kind or kind:lr; of several, a short trial picks one"
    )
    parser.add_argument("--trial-seconds", type=float, default=45)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--audio-guidance", type=float, default=2.0)
    parser.add_argument("--worse", type=Path, help="an earlier folder of this script, to be led away from")
    parser.add_argument("--away", type=float, default=2.0, help="how far, in steps from there to --resume")
    parser.add_argument("--seed", type=int, default=30_000_000)
    parser.add_argument(
        "--keep-latents",
        type=Path,
        help="a folder for latents, which the next run of the same codec, world and seed loads",
    )
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    if arguments.mode == "distill" and arguments.resume is None:
        parser.error("distill needs --resume: the folder of the networks to distil")
    return arguments


def main() -> None:
    arguments = parse()
    ranks = Ranks()
    device = ranks.device
    amp = device.type == "cuda"
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    log = Log(arguments.out / f"{arguments.mode}.jsonl", quiet=not ranks.first)
    budget = Budget(arguments.seconds, ranks)
    codec = load_codec(arguments.codec, device)
    tokenizer = build_tokenizer()
    clips, long_clips = ranks.share_of(arguments.clips), ranks.share_of(arguments.long_clips)

    made_by = arguments.keep_latents and digest(codec)

    def latents(name: str, seed: int, count: int, frames: int, batch: int) -> Latents:
        path = arguments.keep_latents and arguments.keep_latents / f"{name}_{seed}_{count}_{made_by}.pt"
        built = keep_latents(
            path, lambda: build_latents(codec, seed, count, frames, device, batch=batch), device
        )
        log(event="latents", name=name, clips=count)
        return built

    first = arguments.seed + ranks.rank * clips
    whole = Batcher(latents("whole", first, clips, 39, 192), tokenizer)
    batchers = {"whole": whole, "short": whole.short()}
    if arguments.long_clips:
        first = arguments.seed + 5_000_000 + ranks.rank * long_clips
        batchers["long"] = Batcher(latents("long", first, long_clips, 124, 24), tokenizer)
    count = min(256, arguments.clips)
    held_back = Batcher(latents("held_back", arguments.seed - 100_000, count, 39, 192), tokenizer)
    drawn = Drawn(readout(whole.data.video[:2000], whole.data.cartoons[:2000]))
    blank = held_back.blank
    block_fn: Callable = block_forward
    if amp and not arguments.no_compile:
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.cache_size_limit = 64
        block_fn = torch.compile(block_forward, dynamic=True)
    teacher = None
    if arguments.mode == "distill":
        frozen = [
            folder and load_networks(folder, device).requires_grad_(False).eval()
            for folder in (arguments.resume, arguments.worse)
        ]
        guidance = arguments.guidance, arguments.audio_guidance
        teacher = Teacher(networks=frozen[0], guidance=guidance, worse=frozen[1], away=arguments.away)

    def losses(networks: torch.nn.ModuleDict, batch: Batch) -> dict[str, torch.Tensor]:
        if teacher is None:
            return flow_loss(networks, batch, blank, block_fn, drawn)
        return guided_loss(networks, teacher, batch, blank, block_fn, drawn)

    def run(kind: str, limit: Budget, networks, average: Average, optimizers, decay: bool, warm: int) -> int:
        parameters = list(networks.parameters())
        chooser = torch.Generator().manual_seed(arguments.seed)
        begin = limit.tick()
        step = 0
        for step in limit.steps():
            share = (limit.share - begin) / max(1e-6, 1 - begin)
            factor = min(1.0, (step + 1) / warm)
            if decay and share > 1 - arguments.decay_share:
                factor *= max(0.01, (1 - share) / arguments.decay_share)
            batch = draw_batch(batchers, ranks.share_of(arguments.batch), chooser)
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                parts = losses(networks, batch)
            scale_rates(optimizers, factor)
            loss = parts["video"] + AUDIO_WEIGHT * batch.heard * parts["audio"]
            loss = loss + DRAWN_WEIGHT * parts["drawn_evenly"] + CARTOON_WEIGHT * parts.get("cartoon", 0.0)
            norm = descend(loss, parameters, optimizers, ranks)
            average.update(networks)
            if step % 100 == 0:
                numbers = {name: float(value.detach()) for name, value in parts.items()}
                log(run=kind, step=step, share=round(share, 3), factor=factor, grad=float(norm), **numbers)
            if step % 1000 == 999 and ranks.first:
                if decay:
                    save(average)
                log(run=kind, step=step, **validate(average.shadow, held_back, blank, amp))
        return step

    def save(average: Average) -> None:
        for name, network in average.shadow.items():
            save_half(network, arguments.out, name)

    def fresh(kind: str):
        """New networks for an optimiser given as `kind` or `kind:lr`."""
        name, _, rate = kind.partition(":")
        networks = load_networks(arguments.resume, device)
        return networks, Average(networks), optimizers_of(networks, name, float(rate or arguments.lr))

    ranks.start([])
    kinds = arguments.optimizers.split(",")
    chosen, best = kinds[0], math.inf
    if len(kinds) > 1:
        # Compile first, so that the first trial does not pay for it.
        run("warm", Budget(0.55 * arguments.trial_seconds, ranks), *fresh(kinds[0]), decay=False, warm=50)
        for kind in kinds:
            networks, average, optimizers = fresh(kind)
            steps = run(
                kind,
                Budget(arguments.trial_seconds, ranks),
                networks,
                average,
                optimizers,
                decay=False,
                warm=150,
            )
            result = validate(average.shadow, held_back, blank, amp)
            log(event="trial", kind=kind, steps=steps, **result)
            error = ranks.agree(result["val_video"])
            if error < best:
                chosen, best = kind, error
    networks, average, optimizers = fresh(chosen)
    steps = run(
        chosen,
        budget,
        networks,
        average,
        optimizers,
        decay=True,
        warm=200 if arguments.resume is None else 50,
    )
    ranks.stop()
    if ranks.first:
        save(average)
        log(event="done", steps=steps, **validate(average.shadow, held_back, blank, amp))


if __name__ == "__main__":
    main()
