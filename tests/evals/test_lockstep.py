"""Many clips in lockstep against the production run of each alone: same controllers, same latents."""

import threading
from collections import Counter
from itertools import pairwise

import pytest
import torch
from PIL import Image

from evals.lockstep import Job, Lockstep
from evals.sampling import Sampler
from evals.turns import Asked, Done, Worker
from evals.world.render import build_scene, render
from evals.world.spec import draw_clip, reference_still
from videoaccel.forward import current_forward
from videoaccel.pipelines.family import family_of
from videoaccel.pipelines.loading import load
from videoaccel.pipelines.request import Reference, Request

FORWARDS = 3
SIZE = 64
"""Edge of the canvas, px: half the bundled model's own, for a quarter of its rows."""


@pytest.fixture(scope="module")
def pipe():
    return load("tiny-h3", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def lockstep(pipe):
    return Lockstep(Sampler(pipe, torch.device("cpu")))


class HoldEveryOther:
    """Asks at step 0 and at every other step of `first`'s parity, and holds what it got in between."""

    def __init__(self, first: int = 0) -> None:
        self.first, self.held, self.calls = first, {}, []

    def velocity(self, call):
        assert current_forward().request_id == call.request_id
        self.calls.append(call)
        if not self.held or (call.step.index - self.first) % 2 == 0:
            self.held = {name: value.clone() for name, value in call.dense().items()}
        return self.held

    def after_step(self, step, latents):
        return None


class Correct:
    """Runs each forward, as `sparse` at odd steps, and afterwards scales one stream of the sample."""

    def velocity(self, call):
        return call.dense("sparse" if call.step.index % 2 else "dense")

    def after_step(self, step, latents):
        return {"video": latents["video"] * 0.9} if step.index % 2 else {"audio": latents["audio"] + 0.1}


CHAIN = {"correct": Correct, "hold": lambda: HoldEveryOther(1)}
"""Correct's forwards are spared where hold answers; both may correct."""


def alone(pipe, spec, controllers, task="t2va", anchors=(), forwards=FORWARDS):
    """The production run of one clip, after `denoise`."""
    inputs = {"prompt": spec.reference_prompt() if task == "ref2va" else spec.caption()}
    if task == "ref2va":
        still = render(build_scene([reference_still(spec)], pipe.config.reference_image_short_edge))[0, 0]
        inputs["references"] = (Reference(kind="image", image=Image.fromarray(still.numpy())),)
    elif task == "fl2va":
        frames = render(build_scene([spec], SIZE))[0].numpy()
        names = {"first": ("first_frame", 0), "last": ("last_frame", -1)}
        inputs |= {names[anchor][0]: Image.fromarray(frames[names[anchor][1]]) for anchor in anchors}
    request = Request(
        task=task,
        seed=spec.seed,
        steps=forwards + 1,
        num_frames=spec.frames,
        height=SIZE,
        width=SIZE,
        **inputs,
    )
    run = family_of(pipe).start(pipe, request)
    run.make_latents(controllers=controllers)
    return run


def distances(run, ran):
    """Relative L2 distance of each stream's latent, batched against alone."""
    mine = {"video": ran.sampled.latents, "audio": ran.sampled.audio_latents}
    stock = {"video": run.latents["video"][0], "audio": run.latents["audio"]}
    return {name: float((mine[name] - stock[name]).norm() / stock[name].norm()) for name in mine}


@pytest.mark.parametrize(
    ("task", "anchors"), [("t2va", ()), ("ref2va", ()), ("fl2va", ("first", "last")), ("fl2va", ("last",))]
)
def test_each_clip_is_its_production_run(pipe, lockstep, task, anchors):
    """Two clips share a batch and one is alone; controllers and step counts differ from clip to clip."""
    specs = [draw_clip(seed, frames=22, objects=1) for seed in (4, 5)]
    settings = [(CHAIN, FORWARDS), ({"hold": HoldEveryOther}, FORWARDS - 1)]
    jobs, mine = [], []
    for spec, (parts, forwards) in zip(specs, settings, strict=True):
        controllers = {name: make() for name, make in parts.items()}
        mine.append(controllers)
        jobs.append(Job(spec=spec, forwards=forwards, controllers=controllers))
    found = lockstep.run(jobs, task=task, anchors=anchors, size=SIZE)
    for spec, ran, (parts, forwards), controllers in zip(specs, found, settings, mine, strict=True):
        theirs = {name: make() for name, make in parts.items()}
        run = alone(pipe, spec, theirs, task, anchors, forwards)
        assert all(distance <= 2e-5 for distance in distances(run, ran).values()), distances(run, ran)
        assert ran.sampled.spec == spec
        assert ran.forwards == run.forwards
        assert ran.forwards_run == run.forwards["dense"] + run.forwards["sparse"]
        for call, stock in zip(controllers["hold"].calls, theirs["hold"].calls, strict=True):
            assert call.plan == stock.plan
            assert call.layout == stock.layout == run.layout
            assert call.step == stock.step
            assert call.step.coefficient == stock.step.coefficient
            assert call.branch == stock.branch
            assert {n: v.shape for n, v in call.latents.items()} == {
                n: v.shape for n, v in stock.latents.items()
            }
            assert list(call.controllers) == list(stock.controllers)
    ids = {call.request_id for controllers in mine for call in controllers["hold"].calls}
    assert len(ids) == len(specs)


def test_without_controllers_a_clip_is_the_samplers(lockstep):
    specs = [draw_clip(seed, frames=22, objects=count) for seed, count in ((4, 2), (5, 1))]
    plain = lockstep.sampler.sample(specs, forwards=2, size=SIZE)
    found = lockstep.run([Job(spec=spec, forwards=2) for spec in specs], size=SIZE)
    for ran, want in zip(found, plain, strict=True):
        assert torch.allclose(ran.sampled.latents, want.latents, rtol=1e-4, atol=1e-4)
        assert torch.allclose(ran.sampled.audio_latents, want.audio_latents, rtol=1e-4, atol=1e-4)
        assert ran.forwards == Counter(dense=2)


class InParts:
    """The transformer's parts in order, cut at `cuts`; stops a step after the first part where told to."""

    def __init__(self, cuts, stop_at=()) -> None:
        self.cuts, self.stop_at = cuts, stop_at

    def velocity(self, call):
        hidden, edges = call.blocks.enter(), [0, *self.cuts, call.blocks.count]
        for start, stop in pairwise(edges):
            hidden = call.blocks.run(hidden, start, stop)
            if call.step.index in self.stop_at:
                break
        return call.blocks.leave(hidden)

    def after_step(self, step, latents):
        return None


def test_the_transformer_in_parts_is_the_transformer(pipe, lockstep):
    """Clips that cut the stack in different places, with one that does not; work counts by blocks."""
    specs = [draw_clip(seed, frames=22, objects=1) for seed in (4, 5)]
    whole = lockstep.run([Job(spec=spec, forwards=2) for spec in specs], size=SIZE)
    cuts = ((1,), (3, 5))
    jobs = [
        Job(spec=spec, forwards=2, controllers={"p": InParts(cut)})
        for spec, cut in zip(specs, cuts, strict=True)
    ]
    parts = lockstep.run(jobs, size=SIZE)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one.sampled.latents, other.sampled.latents, rtol=1e-4, atol=1e-4)
        assert (other.forwards, other.forwards_run) == (Counter(dense=2), 2.0)
    job = Job(spec=specs[0], forwards=2, controllers={"p": InParts((2,), stop_at=(1,))})
    (ran,) = lockstep.run([job], size=SIZE)
    assert ran.forwards == Counter(dense=1, reused=1, probe=1)
    assert ran.forwards_run == 1 + 2 / len(pipe.transformer.transformer_blocks)


class Fails(HoldEveryOther):
    def after_step(self, step, latents):
        if step.index == 1:
            raise ArithmeticError("of one clip")
        return None


def test_an_error_of_one_clip_ends_the_run_and_its_threads(lockstep):
    threads = set(threading.enumerate())
    specs = [draw_clip(seed, frames=22, objects=1) for seed in (4, 5)]
    makes = (HoldEveryOther, Fails)
    jobs = [Job(spec=s, forwards=3, controllers={"x": make()}) for s, make in zip(specs, makes, strict=True)]
    with pytest.raises(ArithmeticError, match="of one clip"):
        lockstep.run(jobs, size=SIZE)
    assert set(threading.enumerate()) == threads
    # Nothing of it is left on the pipeline either.
    assert lockstep.run([Job(spec=specs[0], forwards=1)], size=SIZE)[0].forwards == Counter(dense=1)


def test_a_closed_worker_is_gone_wherever_it_stood():
    seen = []

    def stubborn(ask):
        try:
            ask("first")
        finally:
            seen.append("cleaned up")
            ask("nobody answers this")

    for resumes in (0, 1):
        worker = Worker(stubborn, "stubborn")
        for _ in range(resumes):
            assert worker.resume() == Asked("first")
        worker.close()
    assert seen == ["cleaned up"]
    assert not any(thread.name == "stubborn" for thread in threading.enumerate())
    worker = Worker(lambda ask: ask(1) + ask(2), "adds")
    assert [worker.resume(), worker.resume(10), worker.resume(20)] == [Asked(1), Asked(2), Done(30)]
    worker.close()
