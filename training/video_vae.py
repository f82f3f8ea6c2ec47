"""Trains tiny-h3's video VAE on clips rendered on the accelerator.

`python -m training.video_vae --seconds 350 --out DIR [--resume DIR [--decoder-only]]`.

A clip of 22 frames is the shortest that has every
kind of latent frame: two chunks, and the cross-fade between them. The loss is on pixels and on their
differences, with a light pull of the posterior towards a unit normal.

Two more things make latents that a small transformer can generate. The decoder sees them under white noise of
up to `DECODER_NOISE` standard deviations, so that nothing is kept in directions that carry no variance and
small errors of generated latents are borne. And a linear head reads the clip's cartoon (cartoon.py) from them
under noise of up to `CARTOON_NOISE`, so that what the caption fixes is among the first things to come out of
the noise (after Yao et al., 2025, "Reconstruction vs. generation", who align latents with a vision model's).
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

from evals.batched import PATCH
from evals.pixels import PIXEL_MEAN, PIXEL_STD, denormalise, normalise
from training.cartoon import CHANNELS, SCALE, cartoon, saturated
from training.common import (
    Budget,
    Log,
    cosine,
    descend,
    draw_specs,
    latent_statistics,
    load_into,
    mixed_optimizers,
    pictures,
    save_half,
    scale_rates,
)
from training.fast_encoder import encode_chunk
from training.parallel import Ranks
from training.skeleton import VIDEO_VAE

FRAMES = 22
KL_WEIGHT = 2e-4
EDGE_WEIGHT = 0.6
OBJECT_WEIGHT = 4.0
DECODER_NOISE = 0.25
CARTOON_NOISE = 1.2
CARTOON_WEIGHT = 0.25


def encode_moments(vae: AutoencoderKLMiniMaxH3, pixels: torch.Tensor) -> torch.Tensor:
    """Posterior moments of `(B, 3, 17n+5, H, W)` pixels: what `vae._encode` gives, without its padded frames.

    The last chunk of a clip holds five frames and is causal, so encoding it alone yields the two latent
    frames that `_encode` keeps of it.
    """
    chunk = vae.config.clip_length
    dtype = torch.bfloat16 if pixels.is_cuda else torch.float32
    parts = [encode_chunk(vae, pixels[:, :, i : i + chunk], dtype) for i in range(0, pixels.shape[2], chunk)]
    return torch.cat(parts, dim=2)


def object_weight(pixels: torch.Tensor) -> torch.Tensor:
    """`(B, 1, T, H, W)`: 1 on the muted background, `OBJECT_WEIGHT` on and around saturated objects.

    Objects cover a tenth of a clip and carry what the caption says; unweighted, the codec spends itself on
    the background and blurs what moves.
    """
    std = torch.tensor(PIXEL_STD, device=pixels.device).view(1, 3, 1, 1, 1)
    mean = torch.tensor(PIXEL_MEAN, device=pixels.device).view(1, 3, 1, 1, 1)
    return 1 + (OBJECT_WEIGHT - 1) * F.max_pool3d(saturated(pixels * std + mean, 1), (1, 5, 5), 1, (0, 2, 2))


def weighted_l1(error: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mean absolute error under a weight of the same shape but for channels."""
    return (error.abs() * weight).mean() / weight.mean()


def reconstruction(decoded: torch.Tensor, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """L1 of pixels, and of their differences along width, height and time."""
    error, weight = decoded - pixels, object_weight(pixels)
    edges = [weighted_l1(error.diff(dim=d), weight.narrow(d, 1, weight.shape[d] - 1)) for d in (2, 3, 4)]
    return {"l1": weighted_l1(error, weight), "edge": sum(edges) / 3}


def cartoon_head() -> torch.nn.Linear:
    """Reads a row's cartoon from its latents; training's own, not part of the model."""
    head = torch.nn.Linear(VIDEO_VAE["latent_channels"] * PATCH[1] * PATCH[2], CHANNELS)
    torch.nn.init.zeros_(head.weight)
    return head


def noise_like(latents: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """White noise, and its level per clip, `(B, 1, 1, 1, 1)`, drawn evenly from [0, most]."""
    level = most * torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
    return level * torch.randn_like(latents), level


def cartoon_error(head: torch.nn.Module, unit: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Share of the cartoon's variance that `head` misses in noisy latents.

    Args:
        unit: `(B, C, T', h, w)` latents of unit variance. wanted: `(B, N, CHANNELS)`.
    """
    noise, level = noise_like(unit, CARTOON_NOISE)
    noisy = (unit + noise) / (1 + level**2)  # the Wiener gain
    rows = patchify_video_latents(noisy, PATCH).view(len(unit), wanted.shape[1], -1)
    return (head(rows).float() - wanted).pow(2).mean() / SCALE


def loss_of(
    vae: AutoencoderKLMiniMaxH3,
    frames: torch.Tensor,
    head: torch.nn.Module,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The training loss and its parts; given `moments` stand for a frozen encoder's."""
    pixels = normalise(frames)
    given = encode_moments(vae, pixels) if moments is None else moments
    mean, logvar = given.float().chunk(2, dim=1)
    logvar = logvar.clamp(-12, 6)
    latents = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    # Noise in units of each channel's own spread, so that growing does not help a channel.
    spread, centre = torch.std_mean(latents.detach(), (0, 2, 3, 4), keepdim=True)
    noise, _ = noise_like(latents, DECODER_NOISE)
    parts = reconstruction(vae._decode(latents + spread * noise).float(), pixels)
    parts["kl"] = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
    loss = parts["l1"] + EDGE_WEIGHT * parts["edge"] + KL_WEIGHT * parts["kl"]
    if moments is None:
        parts["cartoon"] = cartoon_error(head, (latents - centre) / spread, cartoon(frames).float())
        loss = loss + CARTOON_WEIGHT * parts["cartoon"]
    return loss, parts


@torch.no_grad()
def evaluate(vae: AutoencoderKLMiniMaxH3, frames: torch.Tensor) -> dict[str, object]:
    """PSNR in dB (MSE over a clip, median of clips), and channel statistics of latents."""
    psnrs, object_psnrs, latents = [], [], []
    for part in frames.split(16):
        mean = encode_moments(vae, normalise(part)).chunk(2, dim=1)[0]
        decoded = denormalise(vae._decode(mean))
        error = (decoded.float() - part.float()).pow(2).mean(dim=4)
        objects = (object_weight(normalise(part))[:, 0] > 1).float()
        psnrs += (10 * torch.log10(255.0**2 / error.mean(dim=(1, 2, 3)))).tolist()
        inside = (error * objects).sum(dim=(1, 2, 3)) / objects.sum(dim=(1, 2, 3)).clamp_min(1)
        object_psnrs += (10 * torch.log10(255.0**2 / inside)).tolist()
        latents.append(mean.float())
    stacked = torch.cat(latents).transpose(0, 1).flatten(1)
    return {
        "psnr_db": float(torch.tensor(psnrs).median()),
        "object_psnr_db": float(torch.tensor(object_psnrs).median()),
        "latents_mean": stacked.mean(1).tolist(),
        "latents_std": stacked.std(1).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=12000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--test", type=int, default=64, help="held-back clips to report on")
    parser.add_argument("--seed", type=int, default=10_000_000)
    parser.add_argument("--resume", type=Path, help="a folder to go on from, or a model folder")
    parser.add_argument(
        "--decoder-only", action="store_true", help="keep the encoder, and so all latents, as is"
    )
    arguments = parser.parse_args()
    ranks = Ranks()
    device = ranks.device
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    log = Log(arguments.out / "video_vae.jsonl", quiet=not ranks.first)
    budget = Budget(arguments.seconds, ranks)
    vae = AutoencoderKLMiniMaxH3(**VIDEO_VAE).to(device)
    vae.use_tiling = False
    if arguments.resume:
        load_into(vae, arguments.resume, "vae")
    clips, batch = ranks.share_of(arguments.clips), ranks.share_of(arguments.batch)
    frames = pictures(draw_specs(arguments.seed + ranks.rank * clips, clips, FRAMES), device)
    test = pictures(draw_specs(arguments.seed - 100_000, arguments.test, 39), device)
    log(event="rendered", clips=len(frames))
    moments = None
    if arguments.decoder_only:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
        with torch.no_grad():
            moments = torch.cat([encode_moments(vae, normalise(part)).half() for part in frames.split(128)])
        log(event="encoded")
    head = cartoon_head().to(device)
    networks = torch.nn.ModuleList([vae, head])
    parameters = [p for p in networks.parameters() if p.requires_grad]
    blocks = vae.decoder.transformer_blocks
    optimizers = mixed_optimizers(networks, [p for p in blocks.parameters() if p.ndim == 2], arguments.lr)
    ranks.start(networks.parameters())
    order = torch.randperm(len(frames), device=device)
    cursor, begin = 0, budget.tick()
    for step in budget.steps():
        if cursor + batch > len(order):
            order, cursor = torch.randperm(len(frames), device=device), 0
        rows = order[cursor : cursor + batch]
        cursor += batch
        share = (budget.share - begin) / (1 - begin)
        factor = cosine(step, share)
        scale_rates(optimizers, factor)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, parts = loss_of(vae, frames[rows], head, None if moments is None else moments[rows])
        norm = descend(loss, parameters, optimizers, ranks)
        if step % 100 == 0:
            log(
                step=step,
                lr=arguments.lr * factor,
                grad=float(norm),
                **{k: float(v.detach()) for k, v in parts.items()},
            )
    ranks.stop()
    if not ranks.first:
        return
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        result = evaluate(vae, test)
    if arguments.decoder_only:
        # The statistics belong to the latents that the transformer was trained on.
        result.update(latent_statistics(arguments.resume, "vae"))
    save_half(vae, arguments.out, "vae")
    (arguments.out / "vae.json").write_text(json.dumps(result))
    log(event="done", step=step, psnr_db=result["psnr_db"], object_psnr_db=result["object_psnr_db"])


if __name__ == "__main__":
    main()
