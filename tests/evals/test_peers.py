"""The restated peers against the libraries' own caches on the stock pipeline: same decisions and latents."""

import ast
import math
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from evals.lockstep import Job, Lockstep
from evals.peers import peers
from evals.peers.dual_block import DualBlockCache
from evals.peers.easy import EasyCache
from evals.peers.first_block import FirstBlockCache
from evals.peers.library import InCacheContext, cache_dit_enabled, raw_vision, register_block
from evals.peers.magnitude import MagCache, calibrate
from evals.peers.sea import SeaCache
from evals.peers.solvers import Solver, dpm_solver, unipc
from evals.peers.static import StaticSchedule, spread
from evals.peers.taylorseer import TaylorSeerBlocks, TaylorSeerVelocity
from evals.sampling import Sampler, euler
from evals.world.spec import draw_clip
from videoaccel.forward import ForwardCall
from videoaccel.pipelines.family import family_of
from videoaccel.pipelines.layout import Layout
from videoaccel.pipelines.loading import load
from videoaccel.pipelines.request import Plan, Request, StepInfo
from videoaccel.pipelines.schedule import StreamSchedule

FORWARDS = 9
SIZE = 64
"""Edge of the canvas, px: half the bundled model's own, for a quarter of its rows."""
SPEC = draw_clip(4, frames=22, objects=1)
THRESHOLDS = [10 ** (-place / 2.5) for place in range(8)]  # 1 to 0.0016


@pytest.fixture(scope="module")
def pipe():
    return load("tiny-h3", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def lockstep(pipe):
    return Lockstep(Sampler(pipe, torch.device("cpu")))


def of_both_kinds(lockstep, make, values=THRESHOLDS):
    """The value at which about half of the steps run whole, and the clip there: all run in one batch."""
    jobs = [Job(spec=SPEC, forwards=FORWARDS, controllers={"peer": make(value)}) for value in values]
    found = lockstep.run(jobs, size=SIZE)
    value, ran = min(
        zip(values, found, strict=True), key=lambda pair: abs(pair[1].forwards["dense"] - FORWARDS / 2)
    )
    assert 1 < ran.forwards["dense"] < FORWARDS, "no value of the knob makes both decisions"
    return value, ran


def stock(pipe, controller):
    """The production run of the clip on the stock transformer, whatever is installed there."""
    request = Request(
        prompt=SPEC.caption(),
        seed=SPEC.seed,
        steps=FORWARDS + 1,
        num_frames=SPEC.frames,
        height=SIZE,
        width=SIZE,
    )
    run = family_of(pipe).start(pipe, request)
    run.make_latents(controllers={"library": controller})
    return run.latents


def same_clip(ran, latents):
    for mine, theirs in (
        (ran.sampled.latents, latents["video"][0]),
        (ran.sampled.audio_latents, latents["audio"]),
    ):
        assert torch.linalg.norm(mine - theirs) <= 2e-5 * torch.linalg.norm(theirs)


@contextmanager
def diffusers_cache(pipe, config):
    register_block()
    pipe.transformer.enable_cache(config)
    try:
        yield InCacheContext(pipe.transformer)
    finally:
        pipe.transformer.disable_cache()


def held_to(pipe, config, ran):
    """Runs the library's cache on the same clip and compares what it ran and what it made."""
    with diffusers_cache(pipe, config) as context:
        latents = stock(pipe, context)
    assert context.ran == [work == 1.0 for work in ran.work]
    same_clip(ran, latents)


def test_first_block_cache_is_the_librarys(pipe, lockstep):
    from diffusers import FirstBlockCacheConfig

    threshold, ran = of_both_kinds(lockstep, FirstBlockCache)
    held_to(pipe, FirstBlockCacheConfig(threshold=threshold), ran)
    assert {work for work in ran.work} == {1.0, 1 / len(pipe.transformer.transformer_blocks)}


@pytest.mark.parametrize("limits", [{}, {"order": 0, "most": 0, "first": 3, "last": 2}])
def test_seacache_is_the_librarys(pipe, lockstep, limits):
    from diffusers import SeaCacheConfig

    threshold, ran = of_both_kinds(lockstep, lambda value: SeaCache(value, **limits))
    names = {
        "order": "residual_order",
        "most": "max_consecutive_cached",
        "first": "retention_steps",
        "last": "cache_end_steps",
    }
    grid = ran.sampled.latents.shape
    config = SeaCacheConfig(
        threshold=threshold,
        raw_vision_callback=raw_vision(grid[1], grid[2]),
        **{names[name]: value for name, value in limits.items()},
    )
    held_to(pipe, config, ran)


def test_magcache_is_the_librarys(pipe, lockstep, capsys):
    from diffusers import MagCacheConfig

    ratios = calibrate(lockstep, [SPEC], FORWARDS, size=SIZE)
    with diffusers_cache(pipe, MagCacheConfig(calibrate=True, num_inference_steps=FORWARDS)) as context:
        stock(pipe, context)
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0"))
    assert ratios == pytest.approx(ast.literal_eval(printed), rel=1e-4)
    # Others than the model's own, which may be so near 1 that the limits alone make the schedule.
    ratios = [1.0, 1.2, 1.1, 1.05, 0.97, 0.95, 1.02, 0.9, 0.8]
    for most in (1, 3):
        threshold, ran = of_both_kinds(lockstep, lambda value, m=most: MagCache(value, ratios, most=m))
        config = MagCacheConfig(
            threshold=threshold, max_skip_steps=most, num_inference_steps=FORWARDS, mag_ratios=ratios
        )
        held_to(pipe, config, ran)


@pytest.mark.parametrize(
    ("kind", "order", "identifiers"),
    [
        (TaylorSeerBlocks, 1, {"cache_identifiers": [r"transformer_blocks\.\d+"]}),
        (TaylorSeerBlocks, 2, {"cache_identifiers": [r"transformer_blocks\.\d+"]}),
        (
            TaylorSeerVelocity,
            1,
            {
                "cache_identifiers": ["proj_out", "audio_proj_out"],
                "skip_predict_identifiers": [r"transformer_blocks\.\d+"],
            },
        ),
    ],
)
def test_taylorseer_is_the_librarys(pipe, lockstep, kind, order, identifiers):
    from diffusers import TaylorSeerCacheConfig

    peer = kind(3, order=order, warm_up=2)
    (ran,) = lockstep.run([Job(spec=SPEC, forwards=FORWARDS, controllers={"peer": peer})], size=SIZE)
    assert [work == 1.0 for work in ran.work] == [step in (0, 1, 3, 6) for step in range(FORWARDS)]
    config = TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=2,
        max_order=order,
        taylor_factors_dtype=torch.float32,
        **identifiers,
    )
    held_to(pipe, config, ran)


@pytest.mark.parametrize("settings", [{}, {"first": 2, "last": 3, "order": 1}])
def test_dbcache_is_cache_dits(pipe, lockstep, settings):
    """Where cache-dit is installed; it is no requirement."""
    cache_dit = pytest.importorskip("cache_dit")
    warm_up = 4
    threshold, ran = of_both_kinds(lockstep, lambda value: DualBlockCache(value, warm_up=warm_up, **settings))
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=settings.get("first", 1),
        Bn_compute_blocks=settings.get("last", 0),
        residual_diff_threshold=threshold,
        max_warmup_steps=warm_up,
        num_inference_steps=FORWARDS,
    )
    taylor = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=1) if settings.get("order") else None
    with cache_dit_enabled(pipe.transformer, config, taylor):
        latents = stock(pipe, StaticSchedule(range(FORWARDS)))
        skipped = list(pipe.transformer._cached_steps)
    assert skipped == [step for step, work in enumerate(ran.work) if work < 1.0]
    same_clip(ran, latents)
    always = settings.get("first", 1) + settings.get("last", 0)
    assert min(ran.work) == always / len(pipe.transformer.transformer_blocks)


def call_at(index, sigmas, latents, dense):
    """A forward of a family with the one stream `video`, whose transformer is a function."""
    schedule = StreamSchedule(
        timesteps=tuple(1 - sigma for sigma in sigmas[:-1]), sigmas=tuple(sigmas), probe=tuple
    )
    count = len(sigmas) - 1
    step = StepInfo(
        index=index,
        component="transformer",
        timestep={"video": schedule.timesteps[index]},
        sigma={"video": sigmas[index]},
        sigma_next={"video": sigmas[index + 1]},
        branches={"cond": 1.0},
        schedules={"video": schedule},
    )
    plan = Plan(
        family="none",
        task="t2va",
        height=8,
        width=8,
        num_frames=1,
        fps=24.0,
        steps=count,
        forwards=count,
        seed=0,
    )
    return ForwardCall(
        request_id="0",
        plan=plan,
        layout=Layout(segments=()),
        step=step,
        branch="cond",
        latents=latents,
        controllers={},
        dense=dense,
    )


def integrate(controller, field, sigmas, x):
    """The final sample of a flow with this data-ward velocity, along Euler's steps as a run takes them."""
    latents = {"video": x.clone()}
    for index, (sigma, after) in enumerate(pairwise(sigmas)):
        call = call_at(index, sigmas, latents, lambda s=sigma: {"video": field(latents["video"], s)})
        velocity = controller.velocity(call)["video"]
        latents["video"].copy_(euler(latents["video"], velocity, 1 - sigma, sigma, after))
        for stream, value in (controller.after_step(call.step, latents) or {}).items():
            latents[stream].copy_(value)
    return latents["video"]


def shifted(count, shift=3.0):
    base = [1 - place / count for place in range(count + 1)]
    return [shift * s / (1 + (shift - 1) * s) for s in base]


SPREAD = 0.5


def gaussian(x, sigma):
    """The exact velocity for data drawn from a normal distribution of deviation SPREAD."""
    variance = ((1 - sigma) * SPREAD) ** 2 + sigma**2
    return ((1 - sigma) * SPREAD**2 - sigma) / variance * x


@pytest.mark.parametrize("build", [dpm_solver, unipc])
def test_solvers_converge_at_second_order(build):
    """On a flow whose end is known: the noise times the data's deviation."""
    noise = torch.linspace(-2, 2, 12).view(4, 3)

    def error(controller, count):
        end = integrate(controller, gaussian, shifted(count), noise)
        return float((end - SPREAD * noise).norm() / (SPREAD * noise).norm())

    coarse, fine = (error(Solver(build), count) for count in (20, 40))
    assert math.log2(coarse / fine) > 1.6
    one, two = (error(StaticSchedule(range(count)), count) for count in (20, 40))
    assert 0.8 < math.log2(one / two) < 1.2
    assert fine < two / 3


def test_dpm_solver_is_its_formula():
    """The published update in log signal-to-noise, on a velocity field that bends."""
    sigmas, x = shifted(6), torch.linspace(-1, 1, 6).view(2, 3)
    field = lambda x, sigma: torch.sin(3 * x) - sigma  # noqa: E731

    def half_log_snr(sigma):
        return math.log(max(1 - sigma, 1e-6)) - math.log(sigma) if sigma else math.inf

    want, before, step = x.clone(), None, None
    for index, (sigma, after) in enumerate(pairwise(sigmas)):
        clean = want + sigma * field(want, sigma)
        ahead = half_log_snr(after) - half_log_snr(sigma)
        mean = clean
        # The first step has no history, and the last, to no noise at all, is of first order in diffusers.
        if before is not None and index < len(sigmas) - 2:
            mean = clean + ahead / step / 2 * (clean - before)
        want = after / sigma * want + (1 - after) * (1 - math.exp(-ahead)) * mean
        before, step = clean, ahead
    torch.testing.assert_close(integrate(Solver(dpm_solver), field, sigmas, x), want, atol=2e-5, rtol=2e-5)


def test_easycache_by_hand():
    """Inputs 0 to 5; the model, from data to noise, answers 10 + 2 x."""
    peer, asked, answers = EasyCache(0.3, warm_up=2), [], []
    for index in range(6):
        x = torch.tensor([[float(index)]])
        asked.append(False)

        def dense(x=x):
            asked[-1] = True
            return {"video": -(10 + 2 * x)}

        answers.append(float(-peer.velocity(call_at(index, shifted(6), {"video": x}, dense))["video"]))
    # Step 2 adds 2 * 1 / 12 and 3 as much again, which is over; 4 adds 2 * 1 / 16; 5 is the last.
    assert asked == [True, True, False, True, False, True]
    assert answers == [10.0, 12.0, 2 + (12 - 1), 16.0, 4 + (16 - 3), 20.0]


def test_static_schedules_are_spread_and_exact_on_lines():
    assert spread(49, 49) == tuple(range(49))
    assert spread(13, 4) == (0, 4, 8, 12)
    assert spread(9, 1) == (0,)
    for warp in (0.3, 1.0, 3.0):
        for dense in range(2, 50):
            found = spread(49, dense, warp=warp)
            assert len(set(found)) == dense and found == tuple(sorted(found))
            assert (found[0], found[-1]) == (0, 48)
    crowded = spread(49, 10, warp=3.0)
    assert sum(index < 24 for index in crowded) > sum(index > 24 for index in crowded)
    # A velocity that is a line in sigma is forecast exactly at any spacing, a parabola by order 2.
    sigmas, x = shifted(12, 12.0), torch.zeros(2, 3)
    for order, field in ((1, lambda x, s: 2 - 3 * s + 0 * x), (2, lambda x, s: s * s - s + 0 * x)):
        whole = integrate(StaticSchedule(range(12)), field, sigmas, x)
        anchors = (0, 1, 2, 5, 6, 10)
        found = integrate(StaticSchedule(anchors, order=order), field, sigmas, x)
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
        held = integrate(StaticSchedule(anchors, order=0), field, sigmas, x)
        assert (held - whole).abs().max() > 1e-2


def test_a_static_schedule_hands_its_steps_to_a_correction():
    """A correction that replaces each forecast by what the transformer would have said undoes them all."""
    sigmas, x = shifted(8), torch.zeros(2, 3)
    field = lambda x, sigma: torch.full_like(x, math.sin(5 * sigma))  # noqa: E731
    seen = []

    def correct(latents, used):
        seen.append([(step.step.index, step.dense) for step in used])
        last = max((place for place, step in enumerate(used[:-1]) if step.dense), default=-1)
        change = torch.zeros_like(x)
        for step in used[last + 1 : -1]:
            width = step.step.sigma["video"] - step.step.sigma_next["video"]
            change += width * (math.sin(5 * step.step.sigma["video"]) - step.velocity["video"])
        return {"video": latents["video"] + change}

    found = integrate(StaticSchedule((1, 3, 7), order=1, correction=correct), field, sigmas, x)
    torch.testing.assert_close(found, integrate(StaticSchedule(range(8)), field, sigmas, x))
    assert seen == [
        [(0, True)],
        [(0, True), (1, True)],
        [(0, True), (1, True), (2, False), (3, True)],
        [(1, True), (2, False), (3, True), (4, False), (5, False), (6, False), (7, True)],
    ]


def test_every_peer_runs_from_the_catalog(lockstep):
    """All of them in one batch, at their hardest setting; none costs more than the dense run."""
    found = peers(FORWARDS)
    assert len({len(peer.values) for peer in found.values()}) == 1
    assert all(peer.name == name for name, peer in found.items())
    ratios = calibrate(lockstep, [SPEC], FORWARDS, size=SIZE)
    jobs = []
    for peer in found.values():
        value = min(peer.values[-1], FORWARDS)
        calibration = ratios if peer.calibrate else None
        if peer.calibrate:
            with pytest.raises(ValueError, match="calibrate"):
                peer.job(SPEC, value, forwards=FORWARDS)
        jobs += [peer.job(SPEC, value, forwards=FORWARDS, calibration=calibration) for _ in range(2)]
    for first, second in zip(jobs[::2], jobs[1::2], strict=True):
        assert not set(map(id, first.controllers.values())) & set(map(id, second.controllers.values()))
    for name, job, ran in zip(found, jobs[::2], lockstep.run(jobs[::2], size=SIZE), strict=True):
        assert len(ran.work) == job.forwards, name
        assert 1 <= ran.forwards_run <= job.forwards, name
        assert ran.forwards["dense"] + ran.forwards["reused"] == job.forwards, name
