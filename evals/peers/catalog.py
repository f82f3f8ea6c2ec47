"""The peers of a sweep: one knob with eight values each, the rest as its own documentation advises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evals.peers.dual_block import DualBlockCache
from evals.peers.easy import EasyCache
from evals.peers.first_block import FirstBlockCache
from evals.peers.magnitude import MagCache, calibrate
from evals.peers.sea import SeaCache
from evals.peers.solvers import Solver, dpm_solver, unipc
from evals.peers.spec import PeerSpec
from evals.peers.static import StaticSchedule, spread
from evals.peers.taylorseer import TaylorSeerBlocks, TaylorSeerVelocity

STEPS = (33.0, 25.0, 20.0, 16.0, 14.0, 12.0, 10.0, 8.0)
CHANGES = (0.01, 0.02, 0.04, 0.06, 0.1, 0.16, 0.25, 0.4)
"""Relative change of a residual; cache-dit's default is 0.08 and diffusers' 0.05."""
INTERVALS = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0)
"""diffusers' default is 5."""


def peers(forwards: int = 49) -> Mapping[str, PeerSpec]:
    """Every peer by name.

    Args:
        forwards: of the dense schedule that caches run along.
    """
    found = [
        PeerSpec(name="fewer_steps", knob="forwards", values=STEPS, make=lambda value, _: None),
        PeerSpec(
            name="dpm_solver",
            knob="forwards",
            values=STEPS,
            make=lambda value, _: Solver(dpm_solver),
            settings={"solver": "DPM-Solver++(2M)"},
        ),
        PeerSpec(
            name="unipc",
            knob="forwards",
            values=STEPS,
            make=lambda value, _: Solver(unipc),
            settings={"solver": "UniPC, order 2"},
        ),
        PeerSpec(
            name="first_block_cache",
            knob="threshold",
            values=CHANGES,
            make=lambda value, _: FirstBlockCache(value),
        ),
        *(_dual_block(name, order) for name, order in (("dbcache", 0), ("dbcache_taylorseer", 1))),
        # diffusers' limits, and those that its authors publish as E024K6R02, which go further.
        *(
            _magnitude(name, most, retention)
            for name, most, retention in (("magcache", 3, 0.2), ("magcache_k6", 6, 0.2))
        ),
        # With two skips in a row it cannot go below a third of the forwards; without a limit it can.
        *(_sea(name, most) for name, most in (("seacache", 2), ("seacache_unlimited", 0))),
        *(
            _taylorseer(name, kind, order)
            for name, kind, order in (
                ("taylorseer", TaylorSeerBlocks, 1),
                ("taylorseer_order2", TaylorSeerBlocks, 2),
                ("taylorseer_velocity", TaylorSeerVelocity, 1),
            )
        ),
        PeerSpec(
            name="easycache",
            knob="threshold",
            values=(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3),
            make=lambda value, _: EasyCache(value),
            settings={"warm_up": 5},
        ),
        *(_static(name, order, forwards) for name, order in (("static_hold", 0), ("static_linear", 1))),
    ]
    return {peer.name: peer for peer in found}


def _dual_block(name: str, order: int) -> PeerSpec:
    settings: dict[str, Any] = {"first": 1, "last": 0, "warm_up": 8, "order": order}
    return PeerSpec(
        name=name,
        knob="threshold",
        values=CHANGES,
        make=lambda value, _: DualBlockCache(value, **settings),
        settings=settings,
    )


def _magnitude(name: str, most: int, retention: float) -> PeerSpec:
    settings: dict[str, Any] = {"most": most, "retention": retention}
    return PeerSpec(
        name=name,
        knob="threshold",
        values=(0.01, 0.02, 0.04, 0.06, 0.12, 0.24, 0.48, 0.96),
        make=lambda value, ratios: MagCache(value, ratios, **settings),
        settings=settings,
        calibrate=calibrate,
    )


def _sea(name: str, most: int) -> PeerSpec:
    settings: dict[str, Any] = {"order": 1, "first": 1, "last": 1, "most": most, "power": 3.0}
    return PeerSpec(
        name=name,
        knob="threshold",
        values=(0.03, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0),
        make=lambda value, _: SeaCache(value, **settings),
        settings=settings,
    )


def _taylorseer(name: str, kind: Any, order: int) -> PeerSpec:
    settings: dict[str, Any] = {"order": order, "warm_up": 3}
    return PeerSpec(
        name=name,
        knob="interval",
        values=INTERVALS,
        make=lambda value, _: kind(value, **settings),
        settings=settings,
    )


def _static(name: str, order: int, forwards: int) -> PeerSpec:
    return PeerSpec(
        name=name,
        knob="dense",
        values=STEPS,
        make=lambda value, _: StaticSchedule(spread(forwards, int(value)), order=order),
        settings={"order": order, "warp": 1.0},
    )
