"""The ranking as a LaTeX table: means and deviations over seeds, costs to a target, paired differences."""

from __future__ import annotations

from collections.abc import Sequence

from hansa.runs import metrics
from hansa.runs.columns import column_of
from hansa.runs.metrics import MIN_SEEDS, paired_interval
from hansa.study.report import formats
from hansa.study.report.entries import RankedEntry

_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "−": "$-$",
}  # fmt: skip


def escape_latex(text: str) -> str:
    r"""Return text such that LaTeX prints it.

    >>> escape_latex("top_k, 50%")
    'top\\_k, 50\\%'
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def latex_table(ranking: Sequence[RankedEntry], target: float | None = None, *, confidence: float = 0.95) -> str:
    r"""Return a ranking as a LaTeX table for the package booktabs, the best of each column in bold.

    The columns are the score, with its deviation over seeds; with a target, rounds and bits (over all links) to reach
    it, or how many seeds did; and with three or more seeds the difference from the first method: the mean over
    seeds of the paired differences, with its confidence interval, and a star if the interval does not contain 0.

    Args:
        ranking: The methods, as `rank` returns them with this target.
        target: The value that the metric is to reach.
        confidence: The level of the intervals.

    >>> from hansa.study.report import ReportEntry, rank
    >>> print(latex_table(rank([ReportEntry("FedAvg", [{"round": 1, "test_accuracy": 0.5}])])))
    \begin{tabular}{lr}
    \toprule
    method & accuracy, final (\%) \\
    \midrule
    FedAvg & \textbf{50.0} \\
    \bottomrule
    \end{tabular}
    """
    first = ranking[0]
    percent = column_of(first.metric).unit == "fraction"
    unit = r" (\%)" if percent else ""
    label = escape_latex(f"{column_of(first.metric).label}, {metrics.describe_score(first.score)}")
    headings, columns = ["method", label + unit], [[escape_latex(ranked.entry.name) for ranked in ranking]]
    columns.append(
        _bold_best([_score(ranked, percent) for ranked in ranking], _values(ranking, first.score), first.falls)
    )
    if target is not None:
        shown = escape_latex(f"{100 * target:g}%" if percent else f"{target:g}")
        for key, what in (("rounds_to_target", "rounds"), ("bits_to_target", "bits")):
            headings.append(f"{what} to {shown}")
            columns.append(_bold_best([_cost(ranked, key) for ranked in ranking], _values(ranking, key), True))
    differences = [_difference(ranked, first, percent, confidence) for ranked in ranking]
    if any(differences[1:]):
        headings.append(rf"difference, {100 * confidence:g}\% interval ($^*$: without 0)")
        columns.append(["", *(text or "--" for text in differences[1:])])
    rows = [" & ".join(row) + r" \\" for row in zip(*columns, strict=True)]
    return _tabular(headings, rows)


def text_latex_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    r"""Return rows of text as a LaTeX table for the package booktabs.

    Args:
        headings: One heading per column.
        rows: The rows.
        title: The heading of the first column.

    >>> print(text_latex_table(["", "ours"], [["FedAvg", "50.0 ± 1.2"]], "CIFAR-10, accuracy (%)"))
    \begin{tabular}{lr}
    \toprule
    CIFAR-10, accuracy (\%) & ours \\
    \midrule
    FedAvg & 50.0 $\pm$ 1.2 \\
    \bottomrule
    \end{tabular}
    """
    escaped = [" & ".join(map(escape_latex, row)) + r" \\" for row in rows]
    return _tabular([escape_latex(title), *map(escape_latex, headings[1:])], escaped)


def _tabular(headings: Sequence[str], rows: Sequence[str]) -> str:
    body = [r"\toprule", " & ".join(headings) + r" \\", r"\midrule", *rows, r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", *body, r"\end{tabular}"])


def _values(ranking: Sequence[RankedEntry], key: str) -> list[float | None]:
    return [None if ranked.diverged else ranked.numbers.get(key) for ranked in ranking]


def _bold_best(texts: Sequence[str], values: Sequence[float | None], lower: bool) -> list[str]:
    known = [value for value in values if value is not None]
    best = (min(known) if lower else max(known)) if known else None
    return [rf"\textbf{{{text}}}" if value is not None and value == best else text
            for text, value in zip(texts, values, strict=True)]  # fmt: skip


def _score(ranked: RankedEntry, percent: bool) -> str:
    value, over = ranked.numbers.get(ranked.score), ranked.spreads.get(ranked.score)
    if value is None:
        return "--"
    if ranked.diverged:
        return "diverged" if over is None else f"diverged, {len(ranked.diverged)} of {len(ranked.entry.runs)} seeds"
    if percent or over is None:
        text = _number(value, percent)
        return text if over is None else rf"{text} $\pm$ {_number(over.std, percent)}"
    return escape_latex(formats.format_mean_std(formats.format_number, value, over.std))


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}" if percent else f"{value:.3g}"


def _cost(ranked: RankedEntry, key: str) -> str:
    value, over = ranked.numbers.get(key), ranked.spreads.get(key)
    if value is None:
        reached, runs = ranked.numbers.get("reached") or 0, len(ranked.entry.runs)
        return f"{reached} of {runs} seeds" if reached else "never"
    write = formats.format_count if key == "rounds_to_target" else formats.format_bits
    return escape_latex(formats.format_mean_std(write, value, None if over is None else over.std))


def seed_scores(ranked: RankedEntry) -> dict[int | None, float]:
    """Return the score of each seed of a method."""
    stated = f"{ranked.metric}:{'lower' if ranked.falls else 'higher'}"
    values = {
        run.seed: metrics.summarize(run.history, metric=stated, window=ranked.window).get(ranked.score)
        for run in ranked.entry.runs
    }
    return {seed: float(value) for seed, value in values.items() if value is not None}


def _difference(ranked: RankedEntry, first: RankedEntry, percent: bool, confidence: float) -> str:
    """The mean of a method's paired differences from the first one, with its interval; "" with fewer than three seeds
    in common."""
    own, other = seed_scores(ranked), seed_scores(first)
    common = [seed for seed in own if seed in other]
    if ranked is first or len(common) < MIN_SEEDS or ranked.diverged or first.diverged:
        return ""
    interval = paired_interval([own[seed] for seed in common], [other[seed] for seed in common], confidence)
    low, high = (_number(interval.mean + sign * interval.half, percent) for sign in (-1, 1))
    mark = "$^*$" if interval.sign else ""
    return f"${_number(interval.mean, percent)}$ [${low}$, ${high}$]{mark}"
