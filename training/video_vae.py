"""Trains tiny-h3's video VAE on clips rendered on the accelerator.

`python -m training.video_vae --seconds 300 --out DIR`. A clip of 22 frames is the shortest that has every kind of
latent frame: two chunks, and the cross-fade between them. The loss is on pixels and on their differences, with a
light pull of the posterior towards a unit normal; the posterior is sampled, which teaches the decoder to bear the
small errors of generated latents.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3

from training.common import (
    Budget,
    Log,
    denormalise,
    descend,
    draw_specs,
    mixed_optimizers,
    normalise,
    pictures,
    save_half,
)
from training.skeleton import VIDEO_VAE

FRAMES = 22
KL_WEIGHT = 2e-4
EDGE_WEIGHT = 0.6


def encode_moments(vae: AutoencoderKLMiniMaxH3, pixels: torch.Tensor) -> torch.Tensor:
    """Posterior moments of `(B, 3, 17n+5, H, W)` pixels: what `vae._encode` gives, without its padded frames.

    The last chunk of a clip holds five frames and is causal, so encoding it alone yields the two latent frames that
    `_encode` keeps of it.
    """
    chunk = vae.config.clip_length
    parts = [vae.quant_conv(vae.encoder(pixels[:, :, i : i + chunk])) for i in range(0, pixels.shape[2], chunk)]
    return torch.cat(parts, dim=2)


def _differences(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :], x[:, :, 1:] - x[:, :, :-1]


def loss_of(vae: AutoencoderKLMiniMaxH3, pixels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The training loss and its parts."""
    mean, logvar = encode_moments(vae, pixels).float().chunk(2, dim=1)
    logvar = logvar.clamp(-12, 6)
    latents = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    decoded = vae._decode(latents).float()
    pixel = F.l1_loss(decoded, pixels)
    edge = sum(F.l1_loss(a, b) for a, b in zip(_differences(decoded), _differences(pixels), strict=True))
    kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
    return pixel + EDGE_WEIGHT * edge / 3 + KL_WEIGHT * kl, {"l1": pixel, "edge": edge, "kl": kl}


@torch.no_grad()
def evaluate(vae: AutoencoderKLMiniMaxH3, frames: torch.Tensor) -> dict[str, object]:
    """PSNR in dB over held-back clips (MSE over a clip, median over clips), and per-channel latent statistics."""
    psnrs, latents = [], []
    for part in frames.split(16):
        mean = encode_moments(vae, normalise(part)).chunk(2, dim=1)[0]
        decoded = denormalise(vae._decode(mean))
        error = (decoded.float() - part.float()).pow(2).mean(dim=(1, 2, 3, 4))
        psnrs += (10 * torch.log10(255.0**2 / error)).tolist()
        latents.append(mean.float())
    stacked = torch.cat(latents).transpose(0, 1).flatten(1)
    return {
        "psnr_db": float(torch.tensor(psnrs).median()),
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
    parser.add_argument("--resume", type=Path, help="a float16 state to go on from")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    log = Log(arguments.out / "video_vae.jsonl")
    budget = Budget(arguments.seconds)
    vae = AutoencoderKLMiniMaxH3(**VIDEO_VAE).to(device)
    vae.use_tiling = False
    if arguments.resume:
        from safetensors.torch import load_file

        vae.load_state_dict({k: v.float() for k, v in load_file(arguments.resume).items()})
    frames = pictures(draw_specs(arguments.seed, arguments.clips, FRAMES), device)
    test = pictures(draw_specs(arguments.seed - 100_000, arguments.test, 39), device)
    log(event="rendered", clips=len(frames))
    blocks = vae.decoder.transformer_blocks
    optimizers = mixed_optimizers(vae, [p for p in blocks.parameters() if p.ndim == 2], arguments.lr)
    if arguments.compile:
        torch._dynamo.config.suppress_errors = True
        vae.encoder.compile(dynamic=False)
        vae.decoder.compile(dynamic=False)
    order = torch.randperm(len(frames), device=device)
    cursor, begin = 0, budget.share
    for step in budget.steps():
        if cursor + arguments.batch > len(order):
            order, cursor = torch.randperm(len(frames), device=device), 0
        batch = frames[order[cursor : cursor + arguments.batch]]
        cursor += arguments.batch
        share = (budget.share - begin) / (1 - begin)
        rate = arguments.lr * min(1.0, (step + 1) / 150) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, parts = loss_of(vae, normalise(batch))
        norm = descend(loss, list(vae.parameters()), optimizers)
        if step % 100 == 0:
            log(step=step, lr=rate, grad=float(norm), **{k: float(v) for k, v in parts.items()})
    for module in (vae.encoder, vae.decoder):
        module._compiled_call_impl = None
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        result = evaluate(vae, test)
    save_half(vae, arguments.out / "vae.safetensors")
    (arguments.out / "vae.json").write_text(json.dumps(result))
    log(event="done", step=step, psnr_db=result["psnr_db"])


if __name__ == "__main__":
    main()
