"""videoaccel: video diffusion transformers served faster, at a stated and checked loss."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from videoaccel.config import AccelConfig, RiskBudget
from videoaccel.errors import UserError
from videoaccel.receipt import Receipt

if TYPE_CHECKING:
    from videoaccel.install import Handle, accelerate
    from videoaccel.pipelines.request import Request

__all__ = ["AccelConfig", "Handle", "Receipt", "Request", "RiskBudget", "UserError", "accelerate"]

try:
    __version__ = version("videoaccel")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    # install.py imports torch, which takes seconds: `videoaccel --help` and a bad flag shouldn't wait for it.
    if name in ("Handle", "accelerate"):
        import videoaccel.install

        return getattr(videoaccel.install, name)
    if name == "Request":
        import videoaccel.pipelines.request

        return videoaccel.pipelines.request.Request
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
