"""How a technique reaches a request, on the bundled model: begin, controllers, current forward, receipts."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from videoaccel.config import AccelConfig, Section
from videoaccel.errors import RequestError, UserError
from videoaccel.forward import ForwardCall, current_forward
from videoaccel.install import accelerate
from videoaccel.pipelines.loading import load
from videoaccel.pipelines.request import Cancelled, Progress, Request, StepInfo, Streams
from videoaccel.receipt import Receipt, Recorder, receipt_of
from videoaccel.schema import strict

SMALL = Request(prompt="a red square bounces", steps=5, num_frames=22, height=64, width=64, seed=3)
FORWARDS = 4


class Switch:
    """A controller of tests: does to each forward what its section says, and logs it."""

    def __init__(self, technique: Technique, section: Any) -> None:
        self.technique, self.section = technique, section

    def velocity(self, call: ForwardCall) -> Streams:
        self.technique.log.append((self.section.name, call.step.index))
        answer = self.section.answers
        if answer == "raise":
            raise RuntimeError("controller at fault")
        if answer == "exhaust":
            torch.empty(1 << 60, dtype=torch.uint8)
        if answer == "nan":
            return {name: value * torch.nan for name, value in call.dense().items()}
        if answer == "hold" and call.step.index % 2:
            return {name: torch.zeros_like(value) for name, value in call.latents.items()}
        return call.dense("sparse") if answer == "sparse" else call.dense()

    def after_step(self, step: StepInfo, latents: Streams) -> Streams | None:
        self.technique.log.append((f"after {self.section.name}", step.index))
        if not self.section.adds:
            return None
        self.technique.seen.append(float(latents["video"].flatten()[0]))
        return {"video": latents["video"] + self.section.adds}


class Technique:
    """A technique of tests, with what its requests left behind."""

    per_request = True

    def spends(self, section: Section) -> bool:
        return False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.log: list[Any] = []
        self.seen: list[float] = []
        self.begun: list[dict[str, Any]] = []
        self.ended = 0
        self.controllers: list[weakref.ref[Switch]] = []

    def install(self, pipe: Any, family: Any, config: AccelConfig, section: Any, undo: ExitStack) -> None:
        pass

    def begin(self, run: Any, recorder: Recorder, section: Any) -> Switch | None:
        self.begun.append(
            {
                "id": run.id,
                "prompt": run.request.prompt,
                "encoded": run.encoded,
                "tier": recorder.config.tier,
                "section": section,
            }
        )
        if section.needs_coefficients:
            self.begun[-1]["coefficients"] = [step.coefficient["video"] for step in run.steps]
        recorder.on_end(self.end)
        if section.answers == "nothing":
            return None
        controller = Switch(self, section)
        self.controllers.append(weakref.ref(controller))
        return controller

    def end(self) -> None:
        self.ended += 1


class Everywhere(Technique):
    per_request = False


SWITCH, EVERYWHERE = Technique(), Everywhere()


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchSection(Section):
    technique: ClassVar[str] = f"{__name__}:SWITCH"

    name: str = "one"
    answers: str = "dense"
    adds: float = 0.0
    needs_coefficients: bool = False


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class EverywhereSection(SwitchSection):
    technique: ClassVar[str] = f"{__name__}:EVERYWHERE"


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AccelConfig):
    everywhere: EverywhereSection | None = None
    one: SwitchSection | None = None
    two: SwitchSection | None = None


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.set_num_threads(1)
    return load("tiny-h3", device="cpu")


@pytest.fixture(autouse=True)
def forget() -> None:
    SWITCH.clear()
    EVERYWHERE.clear()


def stock(pipe: Any, **more: Any) -> Any:
    """The state of diffusers' own call for `SMALL`."""
    return pipe(
        prompt=SMALL.prompt,
        height=SMALL.height,
        width=SMALL.width,
        num_frames=SMALL.num_frames,
        num_inference_steps=SMALL.steps,
        generator=torch.Generator("cpu").manual_seed(SMALL.seed),
        output_type="np",
        **more,
    )


def test_a_run_at_exact_is_the_stock_call_and_so_is_the_pipeline_itself(tiny: Any) -> None:
    expected = stock(tiny)
    with accelerate(tiny, model="tiny-h3", weights="pretrained") as handle:
        assert handle.receipt is None and "no request" in handle.summary()
        clip, receipt = handle.run(SMALL)
        called = stock(tiny)
    for state in (expected, called):
        assert torch.equal(clip.latents["video"], state.get("latents"))
        assert torch.equal(clip.latents["audio"], state.get("audio_latents"))
        assert np.array_equal(clip.audio, state.get("audio")[0].numpy())
    assert handle.receipt is receipt
    assert (receipt.model, receipt.status, receipt.error) == ("tiny-h3", "completed", None)
    # What the model's own facts say, whatever the caller thinks.
    assert receipt.weights == ("pretrained" if tiny.model_facts.trained else "untrained")
    assert (receipt.forwards.dense, receipt.forwards.run) == (FORWARDS, FORWARDS)
    assert "4 dense, 0 sparse, 0 reused of 4" in handle.summary()
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_pipe_called_directly_asks_no_controller(tiny: Any) -> None:
    expected = stock(tiny)
    with accelerate(tiny, Config(one=SwitchSection(answers="hold"))) as handle:
        called = stock(tiny)
        assert SWITCH.begun == [] and SWITCH.log == [] and handle.receipt is None
        clip, _ = handle.run(SMALL)
    assert torch.equal(called.get("latents"), expected.get("latents"))
    assert SWITCH.log and not torch.equal(clip.latents["video"], expected.get("latents"))


def test_a_part_begins_before_anything_runs_with_what_it_needs(tiny: Any) -> None:
    section = SwitchSection(answers="nothing", needs_coefficients=True)
    with accelerate(tiny, Config(one=section)) as handle:
        clip, receipt = handle.run(SMALL)
    (begun,) = SWITCH.begun
    assert begun["prompt"] == SMALL.prompt and not begun["encoded"] and begun["section"] is section
    # The shift of 12 on five levels from 1 to 0, as published: s x / (1 + (s - 1) x).
    levels = [12 * x / (1 + 11 * x) for x in (1, 0.75, 0.5, 0.25, 0)]
    expected = [now - after for now, after in pairwise(levels)]
    assert begun["coefficients"] == pytest.approx(expected, abs=1e-6)
    assert torch.equal(clip.latents["video"], stock(tiny).get("latents"))
    assert receipt.forwards.dense == FORWARDS and SWITCH.ended == 1


def error_of(kind: type[Exception], call: Any) -> Exception:
    """The error that `call` raises. `pytest.raises` would hold on to it by itself."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


@pytest.mark.parametrize("end", ["completed", "cancelled", "failed", "not finite", "refused"])
def test_a_controller_lives_as_long_as_its_request(tiny: Any, end: str) -> None:
    config = Config(
        one=SwitchSection(answers={"failed": "raise", "not finite": "nan"}.get(end, "dense")),
        two=SwitchSection(name="two"),
    )
    done = 0

    def count(progress: Progress) -> None:
        nonlocal done
        done = progress.done if progress.stage == "denoise" else done

    cancel = (lambda: done >= 2) if end == "cancelled" else None
    request = dataclasses.replace(SMALL, width=63) if end == "refused" else SMALL
    kinds = {"cancelled": Cancelled, "failed": RuntimeError, "not finite": RequestError, "refused": UserError}
    with accelerate(tiny, config) as handle:
        before, _ = handle.run(request=SMALL, config=AccelConfig())
        first = handle.receipt
        if end == "completed":
            _, receipt = handle.run(request)
        else:
            caught = error_of(kinds[end], lambda: handle.run(request, on_progress=count, cancel=cancel))
            receipt = receipt_of(caught)
        if end == "refused":
            # It never became a request: nothing began, and there is nothing to say about it.
            assert receipt is None and handle.receipt is first and SWITCH.controllers == []
            return
        assert receipt is not None and handle.receipt is receipt
        if end == "failed":  # the controller's own frame is on this error's traceback
            del caught
        # The others' errors are still held, with every frame of their tracebacks.
        gc.collect()
        assert len(SWITCH.controllers) == 2 and [ref() for ref in SWITCH.controllers] == [None, None]
        assert SWITCH.ended == 2
        again, _ = handle.run(request=SMALL, config=AccelConfig())
    assert torch.equal(again.latents["video"], before.latents["video"])
    status = {"completed": "completed", "cancelled": "cancelled"}.get(end, "failed")
    error = {
        "completed": None,
        "cancelled": "Cancelled after 2 of 4 steps.",
        "failed": "controller at fault",
        "not finite": "the video latent is not finite after 4 forwards; no clip was made: the checkpoint may "
        "be damaged, or the precision too low: download it again, or load it in float32",
    }[end]
    assert (receipt.status, receipt.error) == (status, error)
    steps = {"cancelled": 2, "failed": 0}.get(end, FORWARDS)
    assert (len(receipt.timings.step_s), receipt.forwards.dense) == (steps, steps)
    assert receipt.rows["video"] > 0
    assert receipt.timings.denoise_s >= sum(receipt.timings.step_s)
    assert f"{status}: t2va" in receipt.summary() and (error is None or error in receipt.summary())
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_the_last_controller_is_asked_first_and_spares_those_before_it(tiny: Any) -> None:
    config = Config(
        one=SwitchSection(name="inner", answers="sparse", adds=0.5),
        two=SwitchSection(name="outer", answers="hold", adds=0.25),
    )
    with accelerate(tiny, config) as handle:
        _, receipt = handle.run(SMALL)
    # Fields are one, then two: two is asked first; on odd steps it answers itself.
    expected: list[tuple[str, int]] = []
    for index in range(FORWARDS):
        expected += [("outer", index)] + ([] if index % 2 else [("inner", index)])
        expected += [("after inner", index), ("after outer", index)]
    assert SWITCH.log == expected
    assert (receipt.forwards.sparse, receipt.forwards.reused, receipt.forwards.dense) == (2, 2, 0)
    # The second sees the sample as the first corrected it.
    first, second = SWITCH.seen[::2], SWITCH.seen[1::2]
    assert second == pytest.approx([value + 0.5 for value in first], abs=1e-6)


@pytest.mark.parametrize("sparse", ["inner", "middle", "outer"])
def test_a_forward_is_sparse_where_any_controller_on_its_way_says_so(tiny: Any, sparse: str) -> None:
    sections = [
        kind(name=name, answers="sparse" if name == sparse else "dense")
        for kind, name in ((EverywhereSection, "inner"), (SwitchSection, "middle"), (SwitchSection, "outer"))
    ]
    with accelerate(tiny, Config(everywhere=sections[0], one=sections[1], two=sections[2])) as handle:
        _, receipt = handle.run(SMALL, decode=False)
    assert (receipt.forwards.sparse, receipt.forwards.dense) == (FORWARDS, 0)


def watch(pipe: Any, found: list[Any], before: Any = None) -> Any:
    """A hook on an attention layer deep in the transformer that notes what it can find out there."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if before is not None:
            before()
        call = current_forward()
        hidden = args[0] if args else kwargs["hidden_states"]
        found.append((threading.get_ident(), call, hidden.shape[1]))

    return pipe.transformer.transformer_blocks[1].attn.register_forward_pre_hook(hook, with_kwargs=True)


def test_an_attention_layer_finds_the_request_it_serves(tiny: Any) -> None:
    found: list[Any] = []
    with accelerate(tiny, Config(one=SwitchSection())) as handle:
        hook = watch(tiny, found)
        try:
            clip, _ = handle.run(SMALL)
            calls = [call for _, call, _ in found]
            assert [call.step.index for call in calls] == list(range(FORWARDS))
            assert {call.branch for call in calls} == {"cond"}
            assert {call.request_id for call in calls} == {SWITCH.begun[0]["id"]}
            assert all(call.layout == clip.layout and call.plan == clip.plan for call in calls)
            assert all(call.layout.rows == rows for _, call, rows in found)
            assert all(set(call.controllers) == set() for call in calls), "emptied when the request ended"
            found.clear()
            handle.run(SMALL, config=Config())
            assert len({call.request_id for _, call, _ in found}) == 1 and len(found) == FORWARDS
            found.clear()
            stock(tiny)
            assert [call for _, call, _ in found] == [None] * FORWARDS
        finally:
            hook.remove()
    assert current_forward() is None


def test_code_in_the_transformer_finds_its_own_state_of_the_request(tiny: Any) -> None:
    names: list[str] = []

    def look() -> None:
        call = current_forward()
        assert call is not None
        names.extend(f"{key}={controller.section.name}" for key, controller in call.controllers.items())  # type: ignore[attr-defined]

    with accelerate(tiny, Config(one=SwitchSection(name="a"), two=SwitchSection(name="b"))) as handle:
        hook = watch(tiny, [], look)
        try:
            handle.run(SMALL)
        finally:
            hook.remove()
    assert names == ["one=a", "two=b"] * FORWARDS


def test_two_threads_on_one_pipeline_each_find_their_own_request(tiny: Any) -> None:
    """Both are inside the transformer at once, at every forward: the barrier sees to it."""
    requests = [SMALL, dataclasses.replace(SMALL, width=96, seed=4)]
    found: list[Any] = []
    pair = threading.Barrier(2, timeout=120)
    clips: dict[int, Any] = {}
    with accelerate(tiny, Config(one=SwitchSection())) as handle:
        alone = [handle.run(request)[0] for request in requests]
        SWITCH.clear()
        hook = watch(tiny, found, pair.wait)

        def client(number: int) -> None:
            clips[number] = (threading.get_ident(), *handle.run(requests[number]))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            hook.remove()
    assert len(found) == 2 * FORWARDS
    ids = set()
    for number, (thread_id, clip, receipt) in clips.items():
        mine = [(call, rows) for thread, call, rows in found if thread == thread_id]
        assert [call.step.index for call, _ in mine] == list(range(FORWARDS))
        assert {call.plan.width for call, _ in mine} == {requests[number].width}
        assert all(call.layout.rows == rows for call, rows in mine)
        (request_id,) = {call.request_id for call, _ in mine}
        ids.add(request_id)
        assert torch.equal(clip.latents["video"], alone[number].latents["video"])
        assert receipt.forwards.dense == FORWARDS
    assert ids == {begun["id"] for begun in SWITCH.begun} and len(ids) == 2


def test_a_request_may_have_a_config_of_its_own(tiny: Any) -> None:
    installed = Config(one=SwitchSection(answers="hold"))
    with accelerate(tiny, installed) as handle:
        _, receipt = handle.run(SMALL, config=Config())
        assert receipt.forwards.dense == FORWARDS and SWITCH.begun == []
        _, receipt = handle.run(SMALL, config=Config(one=SwitchSection(answers="sparse")))
        assert receipt.forwards.sparse == FORWARDS
        _, receipt = handle.run(SMALL)
        assert receipt.forwards.reused == FORWARDS // 2
        with pytest.raises(UserError, match="two is not installed"):
            handle.run(SMALL, config=Config(two=SwitchSection()))
        with pytest.raises(UserError, match="spends risk_budget"):
            handle.run(SMALL, config=Config(one=SwitchSection(), risk_budget=0.1))
        with pytest.raises(UserError, match="tier 'high' is planned"):
            handle.run(SMALL, config=Config(tier="high", risk_budget=0.1))
    section = EverywhereSection()
    with accelerate(tiny, Config(everywhere=section, one=SwitchSection())) as handle:
        for config in (Config(), Config(everywhere=EverywhereSection(name="other"))):
            with pytest.raises(UserError, match="everywhere is installed for every request"):
                handle.run(SMALL, config=config)
        handle.run(SMALL, config=Config(everywhere=section))
        assert len(EVERYWHERE.begun) == 1 and len(SWITCH.begun) == 3 - 1


@pytest.mark.parametrize("kind", ["h3", "wan"])
@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ("a red square", "got the str 'a red square'"),
        ((4, 0), r"got \(4, 32\)"),
        ((1, 4, 1), r"got \(1, 4, 33\)"),
        ((2, 4, 0), r"got \(2, 4, 32\)"),
        ((1, 0, 0), r"got \(1, 0, 32\)"),
        (torch.long, "floating point, not torch.int64"),
    ],
)
def test_bad_prompt_embeds_get_one_line(tiny: Any, build_wan: Any, kind: str, shape: Any, line: str) -> None:
    pipe = tiny if kind == "h3" else build_wan()
    width = pipe.transformer.config.text_dim
    given = shape
    if isinstance(shape, tuple):
        given = torch.zeros(*shape[:-1], width + shape[-1])
    elif isinstance(shape, torch.dtype):
        given = torch.zeros(1, 4, width, dtype=shape)
    said = line.replace("33", str(width + 1)).replace("32", str(width))
    request = SMALL if kind == "h3" else Request(prompt="x", guidance=1.0)
    with accelerate(pipe) as handle, pytest.raises(UserError, match=said) as caught:
        handle.run(request, prompt_embeds=given)
    assert "\n" not in str(caught.value)


def test_what_is_no_function_is_refused(tiny: Any) -> None:
    with accelerate(tiny) as handle:
        with pytest.raises(UserError, match="cancel must be a function, not Event; give an Event's is_set"):
            handle.run(SMALL, cancel=threading.Event())  # type: ignore[arg-type]
        with pytest.raises(UserError, match="on_progress must be a function, not bool"):
            handle.run(SMALL, on_progress=True)  # type: ignore[arg-type]


def test_without_decoding_the_clip_is_its_latents(tiny: Any) -> None:
    with accelerate(tiny) as handle:
        whole, _ = handle.run(SMALL)
        clip, receipt = handle.run(SMALL, decode=False)
    assert clip.frames.shape == (0, 64, 64, 3) and clip.audio is None
    assert torch.equal(clip.latents["video"], whole.latents["video"])
    assert torch.equal(clip.latents["audio"], whole.latents["audio"])
    assert receipt.timings.decode_s == 0 and receipt.timings.denoise_s > 0


def test_the_peak_of_requests_that_overlap_is_nobodys() -> None:
    from videoaccel.session import peak_memory

    cpu = torch.device("cpu")
    with peak_memory(cpu) as first:
        with peak_memory(torch.device("meta")) as elsewhere:
            assert first.alone
        with pytest.raises(RuntimeError), peak_memory(cpu) as second:
            raise RuntimeError
        with peak_memory(cpu) as third:
            pass
    with peak_memory(cpu) as later:
        assert later.read() == {}  # a CPU doesn't say
    found = [peak.alone for peak in (first, elsewhere, second, third, later)]
    assert found == [False, True, False, False, True]


def test_nothing_is_removed_under_a_running_request_and_nothing_runs_after(tiny: Any) -> None:
    handle = accelerate(tiny, Config(one=SwitchSection()))

    def interfere(progress: Progress) -> None:
        if progress.stage == "denoise" and progress.done == 1:
            with pytest.raises(UserError, match=r"1 request\(s\) still run"):
                handle.remove()

    handle.run(SMALL, on_progress=interfere)
    handle.remove()
    with pytest.raises(UserError, match="was removed: call accelerate"):
        handle.run(SMALL)


def test_a_part_that_refuses_a_request_ends_it_before_anything_ran(build_wan: Any) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = build_wan()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0, stochastic_sampling=True)
    request = Request(prompt="a boat", height=32, width=32, num_frames=5, steps=2, guidance=1.0)
    embeds = torch.zeros(1, 512, 32)
    config = Config(one=SwitchSection(), two=SwitchSection(needs_coefficients=True))
    stages: list[str] = []
    with accelerate(pipe, config) as handle:
        with pytest.raises(UserError, match="has no fixed step coefficients") as caught:
            handle.run(request, prompt_embeds=embeds, on_progress=lambda told: stages.append(told.stage))
        receipt = receipt_of(caught.value)
        assert receipt is not None and receipt is handle.receipt
        assert (receipt.status, receipt.forwards.run, receipt.timings.total_s) == ("failed", 0, 0.0)
        assert stages == [] and receipt.rows == {}
        # The first one had begun; its state was let go, though the error and its traceback are still held.
        gc.collect()
        assert SWITCH.ended == 1 and [ref() for ref in SWITCH.controllers] == [None]
        _, receipt = handle.run(request, prompt_embeds=embeds, config=Config(one=SwitchSection()))
    assert (receipt.status, receipt.forwards.dense) == ("completed", 2)


def test_memory_that_runs_out_on_a_cpu_ends_the_request_in_one_line(tiny: Any) -> None:
    config = Config(one=SwitchSection(answers="exhaust"))
    with accelerate(tiny, config) as handle, pytest.raises(RequestError, match="ran out of memory") as caught:
        handle.run(SMALL)
    assert "\n" not in str(caught.value) and "smaller canvas" in str(caught.value)
    receipt = receipt_of(caught.value)
    assert receipt is not None and (receipt.status, receipt.error) == ("failed", str(caught.value))
