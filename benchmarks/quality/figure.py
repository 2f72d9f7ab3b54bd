"""The two pictures: loss against bytes, and the gap to data parallel against the length of the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quality.studies import Study
from quality.summary import Summary, data_parallel, summaries
from quality.svg import Series, axis, plot
from quality.training import Result


def write_figures(folder: Path, studies: Sequence[Study], results: Mapping[str, Result]) -> None:
    """Write the pictures of which something is known."""
    bytes_picture = loss_against_bytes(studies, results)
    if bytes_picture:
        (folder / "loss_against_bytes.svg").write_text(bytes_picture)
    steps_picture = gap_against_steps(studies, results)
    if steps_picture:
        (folder / "gap_against_steps.svg").write_text(steps_picture)


def loss_against_bytes(studies: Sequence[Study], results: Mapping[str, Result]) -> str:
    """Every contender at the first study's size and length; empty if nothing is known."""
    first = studies[0]
    alike = [study for study in studies if _scale(study) == _scale(first)]
    rows: dict[str, Summary] = {}
    for study in alike:
        for row in summaries(study, results):
            rows.setdefault(row.contender.name, row)
    ordered = sorted(rows.values(), key=lambda row: row.median)
    if not ordered:
        return ""
    series = [
        Series(f"{row.contender.title}: {row.median:.3f}{'' if row.tuned else ' (trial)'}", *_points(row))
        for row in ordered
    ]
    return plot(
        f"{first.size} parameters, {first.islands} islands, {first.steps} steps",
        axis(
            "bytes per parameter that an island moves in the whole run, up and down",
            [r.moved for r in ordered],
            log=True,
        ),
        axis("held-out bits per byte", [bits for row in ordered for bits in row.bits]),
        series,
    )


def _points(row: Summary) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    return [(row.moved, row.median)], [(row.bits[0], row.bits[-1])]


def gap_against_steps(studies: Sequence[Study], results: Mapping[str, Result]) -> str:
    """Contenders that were measured at several lengths; empty if there are none."""
    first = studies[0]
    alike = [study for study in studies if (study.size, study.islands) == (first.size, first.islands)]
    gaps: dict[str, list[tuple[float, float]]] = {}
    for study in sorted(alike, key=lambda one: one.steps):
        reference = data_parallel(study, results)
        if reference is None:
            continue
        for row in summaries(study, results):
            gaps.setdefault(row.contender.title, []).append((study.steps, row.median - reference))
    series = [Series(title, points) for title, points in gaps.items() if len(points) > 1]
    if not series:
        return ""
    return plot(
        f"Gap to tuned data parallel: {first.size} parameters, {first.islands} islands",
        axis("inner steps", [x for one in series for x, _ in one.points], log=True),
        axis("bits per byte above data parallel", [y for one in series for _, y in one.points]),
        series,
    )


def _scale(study: Study) -> tuple[str, int, int]:
    return study.size, study.islands, study.steps
