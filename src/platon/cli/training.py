"""The commands that train: `prune` and `sweep`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from platon.cli.method_names import UNPRUNED, method_names
from platon.cli.model import measure_speed
from platon.cli.option import RARE, with_settings
from platon.cli.terminal import TrainingBar, console, errors, show_progress, show_warning
from platon.deploy.collection import paused_collection
from platon.lab.errors import UserError, nearest
from platon.lab.folder import RunFolder
from platon.lab.measure import Measure
from platon.lab.percent import percent
from platon.lab.settings import ResolvedSettings, resolve
from platon.lab.source import check_name, find_source
from platon.lab.step_count import count_steps
from platon.lab.tasks import TASKS, Request, find


class Engine(StrEnum):
    """Where the runs of a sweep run."""

    local = "local"
    ray = "ray"


@with_settings
def prune(
    flags: dict[str, Any],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="run folder [dim]\\[runs/TASK-METHOD-SHARE-SEED][/dim]", rich_help_panel="Common"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with an interrupted run", rich_help_panel="Common")
    ] = False,
    hold: Annotated[
        bool,
        typer.Option("--hold", help="train a pruned model further and keep its zeros", rich_help_panel="Common"),
    ] = False,
    recipe: Annotated[str | None, typer.Option(help="a name from `platon list recipes`", rich_help_panel=RARE)] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings", rich_help_panel=RARE)] = None,
) -> None:
    """Fine-tune a model and prune it on the way.

    Without options: a small ViT on scikit-learn's digits, dense first, then pruned to 10 %.

    Example: [bold]platon prune --task sst2 --model google-bert/bert-base-uncased --keep 0.1[/bold]
    """
    if hold:
        if flags["method"] not in (None, "hold"):
            raise UserError(f"--hold does not prune; leave out --method {flags['method']}, or leave out --hold")
        flags["method"] = "hold"
    given = recipe or config or any(value is not None for value in flags.values())
    if resume and output is not None and not given:
        from platon.lab.claim import read_started

        resolved = read_started(output)
    else:
        resolved = resolve(recipe, config, flags)
    folder = output or _default_folder(resolved)
    if resume:
        from platon.lab.claim import settings_to_resume

        resolved = settings_to_resume(folder, resolved)
    _check_early(resolved, RunFolder(folder), resume)
    with paused_collection():
        from platon.deploy.ship import ship
        from platon.deploy.shrink import shrink
        from platon.lab import process_group
        from platon.lab.printer import Printer
        from platon.lab.run import prune as run_prune
        from platon.report.run_figure import draw_run

    printer = Printer(show_progress, TrainingBar if console.is_terminal else None, show_warning)
    record = run_prune(resolved, folder, resume, printer, shrink, ship=ship)
    first, several = process_group.is_first(), process_group.count() > 1
    process_group.leave()
    if first:
        draw_run(folder)
        _show_results(record, folder)
    if several:
        # At once: threads of the libraries may abort a process of several when it ends in the usual way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _check_early(resolved: ResolvedSettings, run: RunFolder, resume: bool) -> None:
    """Find what mistakes can be found before torch and transformers are imported, which takes seconds."""
    settings = resolved.settings
    if settings.method not in method_names():
        raise UserError(f"no method is called {settings.method!r}{nearest(settings.method, method_names())}")
    find(settings.task).check_paths(Request.from_settings(settings))
    if settings.steps is not None:
        count_steps(resolved, rows=1)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # of several processes, the first claims the folder for all
        from platon.lab.claim import check_folder

        check_folder(run, resolved, resume)
    if settings.model is not None:
        check_name(settings.model)


def _default_folder(resolved: ResolvedSettings) -> Path:
    s = resolved.settings
    share = f"-{100 * s.keep:g}" if s.penalty is None else f"-penalty{s.penalty:g}"
    share = "" if s.method in UNPRUNED else share
    return Path("runs") / f"{s.task}-{s.method}{share}-seed{s.seed}"


def _show_results(record: dict[str, Any], folder: Path) -> None:
    console.print(_table(record))
    if record["not_converged"]:
        from platon.lab.advice import after_training

        console.print(f"did not converge (N.A.): {escape(record['not_converged'])}", style="yellow")
        for advice in after_training(record):
            console.print(f"  try: {escape(advice)}", style="yellow")
    notice = _share_notice(record)
    if notice:
        console.print(notice, style="yellow")
    run = RunFolder(folder)
    shown = [("model", run.model), ("record", run.record), ("figures", run.figures)]
    small = record.get("compact")
    fast = record.get("fast")
    if fast and "error" not in fast:
        shown.insert(1, ("fast", run.fast))
    if small and "error" not in small:
        shown.insert(1, ("compact", run.compact))
    if small and "error" not in small and not fast:
        try:
            measure_speed(find_source(str(folder)), metric=False, rows=(8,), rounds=10)
        except UserError as error:  # the run itself is complete
            console.print(f"{'speed':8} not measured: {escape(str(error))}")
    for what, path in shown:
        console.print(f"{what:8} {escape(str(path))}")
    for name, found in {"compact": small, "fast": fast}.items():
        if found and "error" in found:
            console.print(f"{name:8} not made: {escape(found['error'])}")
    console.print("\nNext:", style="bold")
    for command, what in _next_commands(record, folder):
        console.print(f"  {escape(command)}  [dim]{what}[/dim]")


def _next_commands(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What can be done with a finished run, and what each is for, in columns."""
    commands = [
        (f"platon predict {folder} --data NEW", "labels and probabilities of new rows"),
        (f"platon export {folder} --format onnx", "for ONNX Runtime; sparse and compact are others"),
        (f"platon speed {folder}", "how fast it is, beside the dense model"),
        (f"platon report {folder}", "tables, figures and a page"),
    ]
    if record["task"] not in TASKS or not TASKS[record["task"]].predicts:
        commands[0] = (f"platon inspect {folder}", "what was kept, layer by layer")
    width = max(len(command) for command, _ in commands)
    return [(f"{command:{width}}", what) for command, what in commands]


def _share_notice(record: dict[str, Any]) -> str | None:
    """Why more is kept than was asked for, if so: some units are kept whatever their score."""
    settings = {name: one["value"] for name, one in record["settings"].items()}
    asked, kept = settings["keep"], record["kept"]
    if record.get("decided_by") != "keep" or settings["units"] == "weights" or kept <= 1.001 * asked:
        return None
    reasons = {
        "heads": "one head of each attention always stays",
        "neurons": "one neuron of each feed-forward layer always stays",
        "heads+neurons": "one head of each attention and one neuron of each feed-forward layer always stay",
    }
    reason = reasons.get(settings["units"], f"only whole {settings['units']} are removed")
    return f"{percent(kept, 2)} is kept, more than the {percent(asked, 2)} that was asked for: {reason}"


def _table(record: dict[str, Any]) -> Table:
    """The results; beside them those of the dense twin and of the fast model, where there are any."""
    from platon.lab.duration import in_words

    table = Table(title=f"{record['task']}, {record['method']}", title_justify="left")
    table.add_column("")
    name = "pruned" if record["method"] != "dense" else "dense"
    trained = ({"dense": record["dense"]} if record["dense"] else {}) | {name: record}
    fast = record.get("fast") or {}
    shown = trained | ({"fast": fast} if fast and "error" not in fast else {})
    for column in shown:
        table.add_column(column, justify="right")

    def add(label: str, values: dict[str, str]) -> None:
        table.add_row(label, *(values.get(column, "") for column in shown))

    for split, metrics in record["results"].items():
        for metric in metrics:
            label = metric if len(record["results"]) == 1 else f"{split} {metric}"
            measured = {column: one for column, one in shown.items() if split in one["results"]}
            add(
                label, {column: Measure(metric).text(one["results"][split][metric]) for column, one in measured.items()}
            )
    shares = {"dense": "100 %", "pruned": percent(record["kept"], 2)}
    add("prunable weights kept", {column: shares[column] for column in trained})
    add("parameters that are not zero", {column: f"{one['parameters']['left']:,}" for column, one in trained.items()})
    add("size on disk", {column: _megabytes(one["bytes"]) for column, one in shown.items()})
    if "fast" in shown:
        beside = next(iter(trained))  # what the fast model was compared with
        taken, memory = fast["milliseconds"], fast["memory"]
        added = {beside: memory["dense"], "fast": memory["fast"]}
        add("memory to load and run it", {column: _megabytes(one) for column, one in added.items() if one is not None})
        rows, length = fast["batch"]
        batch = f"{rows} rows" if length is None else f"{rows} × {length} tokens"
        add(f"milliseconds, {batch}", {beside: f"{taken['dense']:.2f}", "fast": f"{taken['fast']:.2f}"})
        add("times as fast", {"fast": f"{taken['dense'] / taken['fast']:.2f} ×"})
    small = record.get("compact")
    if small and "error" not in small:
        add("parameters of the compact model", {name: f"{small['parameters']:,}"})
        add("its size on disk", {name: _megabytes(small["bytes"])})
        add("largest difference of its outputs", {name: f"{small['difference']:.1e}"})
    add("time", {column: in_words(one["seconds"]) for column, one in shown.items()})
    return table


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def sweep(
    source: Annotated[str, typer.Argument(metavar="FILE", help="sweep file, or a name from `platon list sweeps`")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder of the runs; default: runs/ and the file's name")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time; they share the cores")] = 1,
    engine: Annotated[Engine, typer.Option(help="where runs run: this machine, or a Ray cluster")] = Engine.local,
    dry: Annotated[bool, typer.Option("--dry", help="print what would run and for how long, and stop")] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate/--no-estimate", help="do not time a few steps of each kind of run first", show_default=False
        ),
    ] = True,
) -> None:
    """Run every combination of settings that a file names; finished runs are skipped, interrupted ones go on.

    Example: [bold]platon sweep glue --dry[/bold]
    """
    folder = output or Path("runs") / Path(source).stem
    again = f"platon sweep {source}" + ("" if output is None else f" --output {output}")
    from platon.lab.sweep.run import run

    try:
        failed = run(source, folder, jobs, engine.value, dry, estimate, console)
    except KeyboardInterrupt:
        errors.print(f"stopped; runs that had begun have a checkpoint. Go on with: {escape(again)}")
        raise typer.Exit(130) from None
    if dry:
        return
    if failed:
        errors.print(f"{failed} of the runs failed; their output is in {escape(str(folder / 'logs'))}")
        errors.print(f"Run them again with: {escape(again)}")
        raise typer.Exit(1)
    console.print("\nNext:", style="bold")
    console.print(f"  platon report {escape(str(folder))}")
