"""Reports a study: a table with intervals over seeds and tasks, and curves of training rewards."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from study_file import Row, Study

from marft_jax.errors import BadInput

LAST = 5
"""Steps at the end of a run over which its training reward is averaged."""
FALL = 0.1
"""A run that ends so far below its best has fallen off."""
_DRAWS, _DRAWS_OF_TASKS = 100_000, 20_000
_POWER = 1.43
"""(1.960 + 0.842) / 1.960: from half a 95 % interval to what is seen four times in five."""
_HEADINGS = (
    "| | settings | held-out success (95 %) | more than where it starts (95 %) "
    "| last {last} steps | first >= {reach} | then at least | fell off | tokens | compute "
    "| seconds | seeds | commits |"
)
_LEGEND = (
    "Intervals: over seeds (Student's t) and tasks together; with one seed over tasks alone, so "
    "that another seed may lie outside. All seeds play the same {tasks} tasks; each counts as "
    "right or wrong in all of them alike (returns: as the least or the most), which makes bounds "
    "rather too wide. Tokens: of actions that were sampled, or learned from demonstrations; "
    "compute: those of prompts as well. Then at least: in {last} steps on end. Fell off: runs "
    "whose last {last} steps are {fall} below their best, or that the guard rolled back."
)

Result = dict[str, Any]
"""Figures of a row with a seed: a line of ``results.jsonl``."""


def report(study: Study, results: Sequence[Result], out: Path) -> None:
    """Writes ``table.md`` and, where matplotlib is installed, the pictures."""
    if not results:
        raise BadInput(f"{study.name}: no run is finished, nothing to report")
    out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(table_lines(study, results)) + "\n"
    (out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    curves = {
        name: [r["rewards"] for r in results if r["row"] == name and r.get("rewards")]
        for name, row in study.rows.items()
        if row.command == "train"
    }
    try:
        _draw({name: runs for name, runs in curves.items() if runs}, out / "curves.png")
        _draw_differences(differences(study, results), out / "differences.png")
    except ImportError as error:
        print(f"no picture: pip install -e '.[plot]' ({error})", file=sys.stderr)


def table_lines(study: Study, results: Sequence[Result]) -> list[str]:
    """Lines of ``table.md``: a row of the table for each that has a result."""
    rows = {name: [r for r in results if r["row"] == name] for name in study.rows}
    headings = _HEADINGS.format(last=LAST, reach=study.reach)
    dates, machines = (sorted({r[key] for r in results}) for key in ("date", "machine"))
    notes = [
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {', '.join(machines)}: "
        f"`python scripts/study.py configs/studies/{study.name}.yaml`.",
        _LEGEND.format(tasks=results[-1]["tasks"], last=LAST, fall=FALL),
    ]
    if any("-dirty" in r["commit"] for r in results):
        notes.append("-dirty: that commit with changes which were not committed.")
    if absent := list(_absent(study, rows)):
        notes.append(f"Planned and not run: {'; '.join(absent)}.")
    span = _span(results)
    return [
        f"# {study.name}", "", study.about.strip(), "",
        headings, "|---" * (headings.count("|") - 1) + "|",
        *(_line(study.rows[name], found, rows, span) for name, found in rows.items() if found),
        "", " ".join(notes), *_comparison(differences(study, results), study.chosen),
    ]  # fmt: skip


class Difference(NamedTuple):
    """Held-out success of one row minus another's, paired; ``least`` to ``most`` holds 95 %."""

    name: str
    seeds: int
    middle: float
    least: float
    most: float

    @property
    def seen(self) -> float:
        """A difference of this size is told from none four times in five."""
        return _POWER * (self.most - self.least) / 2


def _span(results: Sequence[Result]) -> tuple[float, float]:
    """Least and most that a task can give, as far as was seen."""
    given = [x for result in results for x in result.get("outcomes", ())]
    return min([0.0, *given]), max([1.0, *given])


def differences(study: Study, results: Sequence[Result]) -> list[Difference]:
    """Differences of the pairs that the study compares, over the seeds that both have."""
    outcomes = {(r["row"], r["seed"]): r["outcomes"] for r in results if "outcomes" in r}
    found = []
    for first, second in study.compare:
        seeds = [n for n in study.seeds if {(first, n), (second, n)} <= outcomes.keys()]
        if seeds:
            one, other = (np.array([outcomes[row, n] for n in seeds]) for row in (first, second))
            name = f"{first} - {second}"
            found.append(Difference(name, len(seeds), *paired(one, other, _span(results))))
    return found


def paired(
    one: np.ndarray, other: np.ndarray, span: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float, float]:
    """Mean difference and its 95 % interval over seeds and tasks.

    Drawn many times: other seeds by Student's t, since a handful is too few to draw from; other
    tasks by a Bayesian bootstrap, with half a task of either extreme, so that no difference in all
    of 100 tasks is not certainty (for one row and one seed this is Jeffreys' interval).

    Args:
        one, other: rewards ``[seeds, tasks]`` of the same seeds and tasks.
        span: least and most that a task can give.
    """
    gains = one - other
    seeds, tasks = gains.shape
    rng = np.random.default_rng(0)
    extreme = span[1] - span[0]
    values = np.array([*gains.mean(0), extreme, -extreme])
    weights = rng.standard_gamma([1.0] * tasks + [0.5, 0.5], (_DRAWS_OF_TASKS, tasks + 2))
    drawn = weights @ values / weights.sum(1)
    if seeds > 1:
        spread = float(gains.mean(1).std(ddof=1)) / seeds**0.5
        drawn = drawn + spread * rng.standard_t(seeds - 1, len(drawn))
    least, most = np.quantile(drawn, [0.025, 0.975])
    return float(gains.mean()), float(least), float(most)


def _comparison(found: Sequence[Difference], chosen: str) -> list[str]:
    if not found:
        return []
    lines = [
        f"| {one.name} | {one.middle:+.3f} ({one.least:+.3f} to {one.most:+.3f}) "
        f"| {one.seen:.2f} | {one.seeds} |"
        for one in found
    ]
    heads = "| difference | held-out success (95 %) | seen four times in five | seeds |"
    return [
        "", heads, "|---|---|---|---|", *lines, "",
        "Differences are paired by seed and task; intervals: seeds by Student's t, tasks by a "
        f"Bayesian bootstrap. {chosen}".strip(),
    ]  # fmt: skip


def fell_off(result: Result) -> bool:
    """True for a run that ends below its best, or that the guard had to roll back."""
    rewards = result["rewards"]
    ends = range(min(LAST, len(rewards)), len(rewards) + 1)
    best = max((mean(rewards[max(0, end - LAST) : end]) for end in ends), default=0.0)
    return best - result["last"] > FALL or result.get("rollbacks", 0) > 0


def _absent(study: Study, rows: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Seeds that a study names and that have no figures, each with the rows they are missing in."""
    missing = defaultdict[str, list[str]](list)
    for name, found in rows.items():
        if seeds := [str(n) for n in study.seeds if n not in {r["seed"] for r in found}]:
            missing[", ".join(seeds)].append(f"`{name}`")
    for seeds, names in missing.items():
        yield f"seeds {seeds} of {'all rows' if len(names) == len(rows) else ', '.join(names)}"


def interval(
    successes: Sequence[float],
    tasks: int,
    before: Sequence[float] = (),
    span: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float, float]:
    """Mean success of runs, and its 95 % interval over seeds and tasks.

    Drawn many times: the mean p of other seeds, by Student's t, since a handful of seeds is too few
    to draw from; then its success on n other tasks, Beta(np + 1/2, n(1 - p) + 1/2) (Jeffreys), as
    if all seeds gave the same answer to a task: only their numbers of right answers are kept.

    Args:
        successes: of each seed, a share of the tasks, or a mean return.
        before: of the same seeds; then mean and bounds are of the difference to it.
        span: least and most that a task can give. Returns in it are taken for shares of it, which
            spread as widely as returns can.
    """
    rng, (least, most) = np.random.default_rng(0), span

    def on_other_tasks(success: Any) -> Any:
        share = np.clip((success - least) / (most - least), 0, 1)
        drawn = rng.beta(tasks * share + 0.5, tasks * (1 - share) + 0.5, _DRAWS)
        return least + (most - least) * drawn

    gains = [a - b for a, b in zip(successes, before or [0.0] * len(successes), strict=True)]
    spread = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    seeds = spread * rng.standard_t(len(gains) - 1, _DRAWS) if spread else 0.0
    drawn = on_other_tasks(mean(successes) + seeds)
    if before:
        drawn = drawn - on_other_tasks(mean(before))
    low, high = np.quantile(drawn, [0.025, 0.975])
    middle = mean(gains)
    return middle, min(float(low), middle), max(float(high), middle)


def _line(
    row: Row,
    found: Sequence[Result],
    rows: Mapping[str, Sequence[Result]],
    span: tuple[float, float],
) -> str:
    tasks = found[0]["tasks"]
    success = "{:.3f} ({:.3f} to {:.3f})".format(
        *interval([r["success"] for r in found], tasks, span=span)
    )
    own = [f"{key}={value}" for key, value in {**row.options, **row.own}.items()]
    if row.start:
        own.insert(0, f"from {row.start}")
    start = {r["seed"]: r["success"] for r in rows.get(row.start or "", ())}
    pairs = [(r["success"], start[r["seed"]]) for r in found if r["seed"] in start]
    gain = ""
    if pairs:
        after, before = zip(*pairs, strict=True)
        gain = "{:+.3f} ({:+.3f} to {:+.3f})".format(*interval(after, tasks, before, span))
    learned = [r for r in found if r.get("last") is not None]
    sampled = learned if row.command == "train" else []
    costs = [r["compute"] for r in learned if "compute" in r]
    cells = [
        row.name, " ".join(own), success, gain,
        f"{mean(r['last'] for r in sampled):.3f}" if sampled else "",
        ", ".join(str(r["reached"] or "-") for r in sampled),
        ", ".join(_least_after(r) for r in sampled),
        f"{sum(map(fell_off, sampled))} of {len(sampled)}" if sampled else "",
        f"{mean(r['tokens'] for r in learned):,.0f}" if learned else "",
        f"{mean(costs):,.0f}" if costs else "",
        f"{mean(r['seconds'] for r in learned):,.0f}" if learned else "",
        str(len(found)), ", ".join(dict.fromkeys(r["commit"] for r in found)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _least_after(result: Result) -> str:
    """Lowest mean of some steps on end, from the one on that reached what there is to reach."""
    if result["reached"] is None:
        return "-"
    later = result["rewards"][result["reached"] - 1 :]
    ends = range(LAST, len(later) + 1)
    return f"{min((mean(later[end - LAST : end]) for end in ends), default=mean(later)):.2f}"


def _draw(curves: Mapping[str, Sequence[Sequence[float]]], file: Path) -> None:
    """Draws a line for each row, the mean of its seeds, with a band around all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not curves:
        return
    many = len(curves) > 18  # more than a legend inside has room for
    size = (9, 0.17 * len(curves)) if many else (7, 3.2)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    if many:
        colours = pyplot.get_cmap("turbo")([n / len(curves) for n in range(len(curves))])
        axes.set_prop_cycle(color=colours)
    for name, runs in curves.items():
        values = np.asarray([run[: min(map(len, runs))] for run in runs])
        steps = range(1, values.shape[1] + 1)
        [line] = axes.plot(steps, values.mean(0), label=name)
        band = values.min(0), values.max(0)
        axes.fill_between(steps, *band, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="reward/mean")
    axes.grid(alpha=0.3)
    if many:
        figure.legend(loc="outside right upper", fontsize="x-small")
    else:
        axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_differences(found: Sequence[Difference], file: Path) -> None:
    """Draws each difference as a point on its interval."""
    if not found:
        return
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.9 + 0.32 * len(found)), layout="constrained")
    for place, one in enumerate(reversed(found)):
        axes.plot([one.least, one.most], [place, place], color="tab:blue")
        axes.plot(one.middle, place, "o", color="tab:blue")
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_yticks(range(len(found)), [f"{one.name} (seeds: {one.seeds})" for one in found[::-1]])
    figure.supxlabel("difference in held-out success, 95 % interval", fontsize="medium")
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
