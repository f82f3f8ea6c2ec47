"""Writes tiny-h3's folder: MiniMax-H3's own classes at small size, in the diffusers layout, fresh weights.

`python -m training.skeleton --out DIR` makes a folder that loads like the 33 B checkpoint. One transformer
serves all three workflows, so `transformer_ref` points at the same subfolder and the weights are stored once.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from evals.world.spec import COLORS, JOINS, MOTIONS, SHAPES, SPEEDS

TEXT_DIM = 128
LATENT_CHANNELS = 24
AUDIO_CHANNELS = 32
CANVAS = 128
REFERENCE_EDGE = 64
TEXT_LAYER = 2
SPECIAL = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

VIDEO_VAE = {
    "latent_channels": LATENT_CHANNELS,
    "block_out_channels": (16, 48, 96, 96),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 1),
    "temporal_downsample_factors": (1, 2, 2, 1),
    "norm_num_groups": 8,
    "spatial_padding_mode": "constant",
    "decoder_num_layers": 4,
    "decoder_num_attention_heads": 4,
    "decoder_attention_head_dim": 64,
    "decoder_ffn_mult": 3,
    "latents_mean": (0.0,) * LATENT_CHANNELS,
    "latents_std": (1.0,) * LATENT_CHANNELS,
}
AUDIO_VAE = {
    "encoder_dim": 16,
    "encoder_rates": (40, 20),
    "latent_dim": 96,
    "latent_channels": AUDIO_CHANNELS,
    "num_attention_heads": 4,
    "decoder_dim": 96,
    "decoder_rates": (20, 40),
    "decoder_kernel_sizes": (40, 80),
    "resblock_kernel_sizes": (7,),
    "resblock_dilation_sizes": ((1, 3),),
    "latents_mean": [0.0] * AUDIO_CHANNELS,
    "latents_std": [1.0] * AUDIO_CHANNELS,
}
TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "hidden_size": 256,
    "num_layers": 8,
    "num_refiner_layers": 1,
    "ffn_dim": 768,
    "in_channels": LATENT_CHANNELS,
    "audio_in_channels": AUDIO_CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 128,
    "time_embed_hidden_dim": 256,
    "time_embed_dim": 32,
    "rope_freq_dim": 10,
    "rope_theta": 1000.0,
}
PROFILE = {
    "family": "minimax_h3",
    "text_encoder_layer": TEXT_LAYER,
    "min_seconds": 0.9,
    "max_seconds": 5.2,
    "default_frames": 39,
    "default_steps": 50,
    "canvas": [CANVAS, CANVAS],
    "max_pixels": 4 * CANVAS * CANVAS,
    "max_prompt_tokens": 256,
}
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE whose merges cover the world's captions; other text falls into smaller pieces."""
    # Of the vocabulary alone, in no random order: the same merges however clips are drawn.
    corpus = []
    for color, shape, motion, speed in itertools.product(COLORS, SHAPES, MOTIONS, SPEEDS):
        article = "an" if color[0] in "aeiou" else "a"
        join = JOINS[len(corpus) % len(JOINS)]
        pan = f", camera panning {('left', 'right')[len(corpus) % 2]}"
        corpus.append(f"{article} {color} {shape} {motion} {speed}{join}{article} {color} {shape}{pan}")
        corpus.append(f"this object {motion} {speed}{pan}")
    corpus += [f"<Picture {n}>: " for n in range(1, 10)] * 100
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    vocab = dict(learned["vocab"])
    for token in SPECIAL:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in learned["merges"]]
    return Qwen2Tokenizer(vocab=vocab, merges=merges, extra_special_tokens=list(SPECIAL[1:]))


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL of three text layers (the second one's output is read) and a vision tower of two."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_DIM,
            "intermediate_size": 256,
            "num_hidden_layers": TEXT_LAYER + 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": IMAGE_PROCESSOR["patch_size"],
            "spatial_merge_size": IMAGE_PROCESSOR["merge_size"],
            "temporal_patch_size": IMAGE_PROCESSOR["temporal_patch_size"],
            "out_hidden_size": TEXT_DIM,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def build_models(seed: int = 0) -> dict[str, torch.nn.Module]:
    """The four trained networks with fresh weights: vae, audio_vae, transformer, text_encoder."""
    torch.manual_seed(seed)
    return {
        "vae": AutoencoderKLMiniMaxH3(**VIDEO_VAE),
        "audio_vae": AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE),
        "transformer": MiniMaxH3Transformer3DModel(**TRANSFORMER),
        "text_encoder": build_text_encoder(build_tokenizer()),
    }


def _index() -> dict[str, object]:
    classes = {
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler", "audio_scheduler"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio", "audio_vae"),
        "processor": ("transformers", "Qwen3VLProcessor", "processor"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler", "scheduler"),
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration", "text_encoder"),
        "tokenizer": ("transformers", "Qwen2Tokenizer", "tokenizer"),
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel", "transformer"),
        "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel", "transformer"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3", "vae"),
    }
    index: dict[str, object] = {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": "0.42.1",
        "canvas_max_pixels": CANVAS * CANVAS,
        "canvas_short_edge": CANVAS,
        "reference_image_short_edge": REFERENCE_EDGE,
    }
    for name, (library, cls, subfolder) in classes.items():
        spec = {
            "pretrained_model_name_or_path": "videoaccel/tiny-h3",
            "revision": None,
            "subfolder": subfolder,
            "type_hint": [library, cls],
            "variant": None,
        }
        index[name] = [library, cls, spec]
    return index


def save_folder(models: dict[str, torch.nn.Module], out: Path, *, trained: bool = False) -> None:
    """Write the folder, which says whether the networks are `trained`.

    Weights as float16: 11 bits of mantissa against bfloat16's 8, at the same size.
    """
    tokenizer = build_tokenizer()
    out.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        state = {key: value.detach().to("cpu", copy=True) for key, value in model.state_dict().items()}
        half = type(model)(model.config) if name == "text_encoder" else type(model).from_config(model.config)
        half.load_state_dict(state)
        half.to(torch.float16).save_pretrained(out / name, safe_serialization=True)
    tokenizer.save_pretrained(out / "tokenizer")
    tokenizer.save_pretrained(out / "processor")
    (out / "processor" / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2) + "\n")
    MiniMaxH3Scheduler(shift=12.0).save_pretrained(out / "scheduler")
    MiniMaxH3Scheduler(shift=3.0).save_pretrained(out / "audio_scheduler")
    (out / "modular_model_index.json").write_text(json.dumps(_index(), indent=2) + "\n")
    (out / "videoaccel.json").write_text(json.dumps({**PROFILE, "trained": trained}, indent=2) + "\n")
    for path in out.rglob("*"):
        # safetensors writes for the owner alone; a wheel is for everyone.
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    models = build_models(arguments.seed)
    for name, model in models.items():
        print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.3f} M")
    print(f"all: {sum(p.numel() for m in models.values() for p in m.parameters()) / 1e6:.3f} M parameters")
    save_folder(models, arguments.out)


if __name__ == "__main__":
    main()
