"""Trains tiny-h3's audio VAE on the world's soundtracks: waveform and log-spectrum losses, no discriminator.

`python -m training.audio_vae --seconds 200 --out DIR`.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3Audio

from training.audio_start import principal_code, start_from
from training.common import Budget, Log, cosine, descend, draw_specs, save_half, scale_rates, sounds
from training.skeleton import AUDIO_VAE

HOP = 800
SEGMENT = 25600  # 0.8 s, 32 latents
WINDOWS = (256, 512, 1024, 2048)
KL_WEIGHT = 1e-5


def spectral_loss(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Spectral convergence and log-magnitude L1 over several STFT windows; inputs `(B, N)`.

    Convergence is relative to each clip's own energy (Yamamoto et al., Parallel WaveGAN, 2020): a plain L1 is
    so small on a short tone that the codec learns the hum and leaves the tones out.
    """
    total = got.new_zeros(())
    for size in WINDOWS:
        window = torch.hann_window(size, device=got.device)
        a, b = (torch.stft(x, size, size // 4, window=window, return_complex=True).abs() for x in (got, want))
        away = torch.linalg.vector_norm(a - b, dim=(1, 2)) / torch.linalg.vector_norm(
            b, dim=(1, 2)
        ).clamp_min(1e-3)
        total = total + away.mean() + 0.2 * F.l1_loss((a + 1e-2).log(), (b + 1e-2).log())
    return total / len(WINDOWS)


def wave_loss(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Error energy over signal energy, per clip, as an amplitude ratio."""
    away = torch.linalg.vector_norm(got - want, dim=1)
    return (away / torch.linalg.vector_norm(want, dim=1).clamp_min(1e-2)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=3000)
    parser.add_argument("--loud-share", type=float, default=0.6, help="of a batch, clips with a bounce")
    parser.add_argument("--segment", type=int, default=SEGMENT)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--test", type=int, default=64, help="held-back clips to report on")
    parser.add_argument("--seed", type=int, default=20_000_000)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    log = Log(arguments.out / "audio_vae.jsonl")
    budget = Budget(arguments.seconds)
    vae = AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE)
    waves = sounds(draw_specs(arguments.seed, arguments.clips, 39), device).flatten(0, 1)
    test = sounds(draw_specs(arguments.seed - 100_000, arguments.test, 39), device).flatten(0, 1)
    whole = waves[:, : waves.shape[1] // HOP * HOP].cpu()
    start_from(vae, *principal_code(whole, HOP, vae.config.latent_channels))
    vae.to(device)
    # Quiet stretches are easy and common.
    loud = torch.nonzero(waves.abs().amax(1) > 0.15).flatten()
    log(event="ready", channels=len(waves), loud=len(loud))
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=arguments.lr, betas=(0.8, 0.98), weight_decay=0.0, fused=device.type == "cuda"
    )
    begin = budget.tick()
    for step in budget.steps():
        rows = torch.randint(len(waves), (arguments.batch,), device=device)
        count = round(arguments.loud_share * arguments.batch)
        rows[:count] = loud[torch.randint(len(loud), (count,), device=device)]
        # On whole latents, as clips are encoded: the world's tones have one phase in every latent.
        latest = (waves.shape[1] - arguments.segment) // HOP
        starts = HOP * torch.randint(latest, (arguments.batch,), device=device)
        batch = waves[rows[:, None], starts[:, None] + torch.arange(arguments.segment, device=device)]
        share = (budget.share - begin) / (1 - begin)
        scale_rates([optimizer], cosine(step, share))
        posterior = vae.encode(batch[:, None]).latent_dist
        logs = (posterior.logs - 2.0).clamp(-7, 1)
        latents = posterior.mean + logs.exp() * torch.randn_like(logs)
        decoded = vae.decode(latents).sample[:, 0]
        kl = 0.5 * (posterior.mean**2 + (2 * logs).exp() - 1 - 2 * logs).mean()
        wave, spectrum = wave_loss(decoded, batch), spectral_loss(decoded, batch)
        loss = 10 * F.l1_loss(decoded, batch) + 0.3 * (wave + spectrum) + KL_WEIGHT * kl
        norm = descend(loss, list(vae.parameters()), [optimizer])
        if step % arguments.log_every == 0:
            log(step=step, wave=float(wave), spectrum=float(spectrum), kl=float(kl), grad=float(norm))
    with torch.no_grad():
        means = torch.cat([vae.encode(part[:, None]).latent_dist.mode() for part in test.split(32)])
        decoded = torch.cat([vae.decode(part).sample[:, 0] for part in means.split(32)])[:, : test.shape[1]]
        error = (decoded - test).pow(2).mean(1)
        snr = 10 * torch.log10(test.pow(2).mean(1) / error)
    stacked = means.transpose(0, 1).flatten(1)
    result = {
        "snr_db": float(snr.median()),
        "snr_loud_db": float(snr[test.abs().amax(1) > 0.15].median()),
        "latents_mean": stacked.mean(1).tolist(),
        "latents_std": stacked.std(1).tolist(),
    }
    save_half(vae, arguments.out, "audio_vae")
    (arguments.out / "audio_vae.json").write_text(json.dumps(result))
    log(event="done", step=step, snr_db=result["snr_db"], snr_loud_db=result["snr_loud_db"])


if __name__ == "__main__":
    main()
