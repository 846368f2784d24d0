"""The command to run next, and what it is for."""

from __future__ import annotations

from runner.config.notation import rounded as typed
from runner.report.edges import edge_values
from runner.report.findings import DONE, Findings
from runner.report.run import Run, SweepRuns, command_of
from runner.report.settings import NAMES, RATE, THRESHOLD, Setting
from runner.report.worth import FEW, SAME, SINGLE, TIE, names, rivals_by_worth, undecided
from runner.run_folder import keys

NO_COMMAND = ("", "")
_OF_SWEEPS = ("seed=", "sweep.name=")  # what a command for one setting leaves out


def next_command(findings: Findings) -> tuple[str, str]:
    """Return the command to run next, and what it is for; empty texts if there is none."""
    sweep = findings.sweep
    if not _has_commands(sweep):
        return NO_COMMAND
    if sweep.single:
        return _sweep_around(findings, sweep.runs[0])
    if sweep.words and any(run.state not in DONE for run in sweep.runs):
        return sweep.command or "", "The same command finishes the sweep:"
    best = findings.best
    return _lower_rates(findings) if best is None else _after_a_result(findings, best)


def _after_a_result(findings: Findings, best: Setting) -> tuple[str, str]:
    """Return the command after a sweep in which some setting has a result."""
    sweep = findings.sweep
    # A branch has the seed of the run in which it begins.
    one_seed = sweep.searches or any(run.branch for run in sweep.runs)
    more = "" if one_seed else _seeds_to_decide(findings)
    if more:
        return more, _purpose_of_seeds(findings)
    if findings.identical:
        return _lower_thresholds(findings, best)
    if sweep.searches:
        return _with_five_seeds(best)
    return _beyond_an_end(findings) or _train_with(findings, best)


def _purpose_of_seeds(findings: Findings) -> str:
    """Return what more seeds are for: they decide, unless some settings are a tie."""
    by_worth = rivals_by_worth(findings)
    if not (TIE in by_worth or SAME in by_worth) or findings.best is None:
        return "More seeds would decide:"
    rivals = names(by_worth.get(FEW, []))
    return f"More seeds would tell {rivals} from {findings.best.label}:"


def _beyond_an_end(findings: Findings) -> tuple[str, str] | None:
    """Return the sweep beyond an end at which the best value is."""
    for key in (THRESHOLD, RATE):
        values = edge_values(findings, key)
        if values:
            command = findings.sweep.command_for(key, values)
            return command, f"The best {NAMES[key]} is at an end: go on"
    return None


def _with_five_seeds(best: Setting) -> tuple[str, str]:
    """Return the command that repeats the best trial of a search."""
    words = [word for word in best.runs[0].overrides if not word.startswith(_OF_SWEEPS)]
    return command_of(["-m", *words, "seed=0,1,2,3,4"]), "The best trial, with five seeds:"


def _has_commands(sweep: SweepRuns) -> bool:
    """Return whether commands of this project made the runs."""
    if all(run.own_loop for run in sweep.runs):
        return False
    return sweep.single or bool(sweep.words)


def _train_with(findings: Findings, best: Setting) -> tuple[str, str]:
    """Return the command that trains with the best setting."""
    sweep = findings.sweep
    words = [word for word in best.runs[0].overrides if not word.startswith(_OF_SWEEPS)]
    if "-m" not in sweep.words and "--multirun" not in sweep.words:
        words.append("hydra.mode=RUN")  # a recipe asked for the sweep
    return command_of([*sweep.flags, *words]), "Train with it:"


def _sweep_around(findings: Findings, run: Run) -> tuple[str, str]:
    """Return the sweep of thresholds around the norms of a single run."""
    [setting] = findings.settings
    points = ("p50", "p90", "p99")
    norms = [findings.scores.average(setting, f"{keys.GRAD_NORM}/{point}") for point in points]
    if run.own_loop or run.mode not in ("norm", "none"):
        return NO_COMMAND
    thresholds = list(dict.fromkeys(typed(norm, 2) for norm in norms if norm))
    if len(thresholds) < 2:
        return NO_COMMAND
    apart = ("clip=", "clip.threshold=", "seed=", "hydra.run.dir=", "clip.mode=")
    kept = [word for word in run.overrides if not word.startswith(apart)]
    swept = [f"clip.threshold={','.join(thresholds)}", "seed=0,1,2"]
    words = ["-m", *findings.sweep.flags, *kept, "clip=norm", *swept]
    return command_of(words), "Compare thresholds at p50, p90 and p99 of ‖G‖:"


def _lower_rates(findings: Findings) -> tuple[str, str]:
    """Return the sweep with lower learning rates, if every setting diverged."""
    lost = all(findings.scores.diverged(setting) for setting in findings.settings)
    rates = [setting.number(RATE) for setting in findings.settings]
    positive_rates = [rate for rate in rates if rate]
    if not lost or not positive_rates or findings.sweep.searches:
        return NO_COMMAND
    lowest = min(positive_rates)
    values = [typed(lowest / 2), typed(lowest / 4)]
    command = findings.sweep.command_for(RATE, values)
    return command, "Lower learning rates may be stable:"


def _lower_thresholds(findings: Findings, best: Setting) -> tuple[str, str]:
    """Return the sweep of thresholds that clip, if none did."""
    points = ("p50", "p90", "p99")
    norms = [findings.scores.average(best, f"{keys.GRAD_NORM}/{point}") for point in points]
    values = list(dict.fromkeys(typed(norm, 2) for norm in norms if norm))
    if (
        any(findings.scores.ratio(s) for s in findings.settings)
        or not values
        or not best.info.limits_norm
    ):
        return NO_COMMAND
    return findings.sweep.command_for(THRESHOLD, values), "These thresholds would clip:"


def _seeds_to_decide(findings: Findings) -> str:
    """Return the command with the seeds that would decide; empty if none is needed."""
    rivals = findings.ranked[1:]
    if not rivals or findings.winner is not None:
        return ""
    by_worth = rivals_by_worth(findings)
    if SINGLE in by_worth:
        return _with_seeds(findings, 5)
    if FEW not in by_worth and (TIE in by_worth or SAME in by_worth):
        return ""  # it stays a tie, whatever is found of settings that are probably worse
    needed = [difference.needed or 0 for _, difference in undecided(findings)]
    return _with_seeds(findings, max(needed)) if needed else ""


def _with_seeds(findings: Findings, count: int) -> str:
    """Return the command that adds seeds to the sweep until it has ``count``."""
    seeds = sorted({int(run.seed) for run in findings.sweep.runs if run.seed.isdecimal()})
    unused = [seed for seed in range(count + len(seeds)) if seed not in seeds]
    added = unused[: max(0, count - len(seeds))]
    return findings.sweep.command_with(sorted([*seeds, *added]))
