"""Puts trained parts together as a model folder.

`python -m training.export --codec DIR --networks DIR --out videoaccel/assets/tiny-h3`
"""

import argparse
from pathlib import Path

import torch

from training.dit import SHIPPED, load_codec, load_networks
from training.skeleton import save_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--codec", type=Path, required=True, help="folder of video_vae.py's and audio_vae.py's output"
    )
    parser.add_argument("--networks", type=Path, help="folder of dit.py's output; fresh weights if not given")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    codec = load_codec(arguments.codec, torch.device("cpu"))
    networks = load_networks(arguments.networks, torch.device("cpu"))
    shipped = {name: networks[name] for name in SHIPPED}
    models = {"vae": codec.vae, "audio_vae": codec.audio_vae, **shipped}
    save_folder(models, arguments.out, trained=arguments.networks is not None)


if __name__ == "__main__":
    main()
