"""Optional packages that others make for these models: what each would give, and whether it is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from videoaccel.cli.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Backend:
    """An optional package.

    Attributes:
        title: its name in words.
        package: its canonical name on an index.
        gives: what it would give.
        install: how.
    """

    title: str
    package: str
    gives: str
    install: str


BACKENDS = (
    Backend(
        title="flash-attn 3",
        package="flash-attn-3",
        gives="dense attention on sm_90 only, through diffusers' set_attention_backend",
        install="build it from the hopper folder of github.com/Dao-AILab/flash-attention",
    ),
    Backend(
        title="sageattention",
        package="sageattention",
        gives="8-bit attention, through diffusers' set_attention_backend",
        install="build it from github.com/thu-ml/SageAttention: the index stops at 1.0.6",
    ),
    Backend(
        title="flashinfer",
        package="flashinfer-python",
        gives="sparse attention in 64-row blocks for sm_120",
        install="pip install flashinfer-python",
    ),
    Backend(
        title="xfuser",
        package="xfuser",
        gives="sequence parallelism over 1, 2, 4 or 8 cards and a tile-parallel VAE, on a machine with cards",
        install="pip install xfuser",
    ),
    Backend(
        title="cache-dit",
        package="cache-dit",
        gives="another cache to compare with",
        install="pip install cache-dit",
    ),
)
"""None is needed, and no op of this package uses one yet."""


def backend_findings(packages: Mapping[str, str]) -> Iterator[Finding]:
    """One line a backend. One that is missing is no fault.

    Args:
        packages: canonical names to versions of what is installed.
    """
    for backend in BACKENDS:
        version = packages.get(backend.package)
        if version is not None:
            yield Finding(check=backend.title, state="ok", says=f"{version}; gives {backend.gives}")
        else:
            says = f"not installed; would give {backend.gives}"
            yield Finding(check=backend.title, state="optional", says=says, fix=backend.install)
