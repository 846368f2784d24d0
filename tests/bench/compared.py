"""Times of two sides, measured for as long as noise hides whether a limit holds."""

from runner.bench.pairs import Side, interleave, ratio


def median_ratio(ours: Side, theirs: Side, rounds: int, limit: float) -> float:
    """Return the median of paired ratios; above ``limit``, that of up to four times the rounds.

    Other work on a machine moves the median of a few rounds. All rounds count.
    """
    both: tuple[list[float], list[float]] = ([], [])
    for _ in range(4):
        times = interleave({"ours": ours, "theirs": theirs}, rounds)
        both[0].extend(times["ours"])
        both[1].extend(times["theirs"])
        median = ratio(*both).median
        if median <= limit:
            break
    return median
