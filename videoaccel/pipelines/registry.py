"""The table of families, with what must be known of each before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "tiny-h3"
"""The model of a command that is given none."""

BUNDLED = {DEFAULT_MODEL: "minimax_h3"}
"""Models that ship in the package, each with its family."""


@dataclass(frozen=True, kw_only=True)
class FamilyEntry:
    """One family in the table.

    Attributes:
        adapter: "module:class" of its `Family`, imported when first needed.
        title: the family's name in words.
        pipeline_classes: names of the diffusers pipeline classes (or bases) it serves; a checkpoint's index
            names one of them.
        tasks: every task of the family.
        forwards: how many forwards N steps are, as diffusers counts steps, for the help.
    """

    adapter: str
    title: str
    pipeline_classes: tuple[str, ...]
    tasks: tuple[str, ...]
    forwards: str = "N"


FAMILIES: dict[str, FamilyEntry] = {
    "minimax_h3": FamilyEntry(
        adapter="videoaccel.pipelines.minimax_h3:MiniMaxH3Family",
        title="MiniMax-H3",
        pipeline_classes=("MiniMaxH3ModularPipeline",),
        tasks=("t2va", "ref2va", "fl2va"),
        forwards="N-1",
    ),
    "wan": FamilyEntry(
        adapter="videoaccel.pipelines.wan:WanFamily",
        title="Wan",
        pipeline_classes=("WanPipeline", "WanImageToVideoPipeline"),
        tasks=("t2v", "i2v"),
    ),
}
"""Family name to its entry."""


def every_task() -> tuple[str, ...]:
    """The tasks of all families, each once."""
    return tuple(dict.fromkeys(task for entry in FAMILIES.values() for task in entry.tasks))
