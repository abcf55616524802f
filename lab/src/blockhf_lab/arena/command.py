"""``blockhf arena``, ``blockhf arena variants`` and ``blockhf arena page``."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

_SECONDS_TO_TELL = "The tasks' budgets are CPU seconds of updates; docs/arena.md has the rules."


def make(telling: Callable[[], AbstractContextManager[None]]) -> "typer.Typer":
    """The commands; ``telling`` shows users what they can mend."""
    import typer

    app = typer.Typer(
        invoke_without_command=True,
        help="Run optimizers over the arena's tasks, and show what came of it.",
        epilog=_SECONDS_TO_TELL,
    )

    @app.callback()
    def arena(
        context: typer.Context,
        quick: Annotated[
            bool, typer.Option("--quick", help="Seed 0 alone, with the settings that were found before.")
        ] = False,
        task: Annotated[list[str] | None, typer.Option(help="One of them; repeat it for each.")] = None,
        optimizer: Annotated[
            list[str] | None, typer.Option(help="One of them, as Adam or blockhf; repeat it for each.")
        ] = None,
        seeds: Annotated[str, typer.Option(help="Numbers with commas between them.")] = "0,1,2",
        out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("runs/arena"),
        processes: Annotated[int, typer.Option(help="Runs at a time, each with one thread.")] = 2,
        again: Annotated[bool, typer.Option("--again", help="Make final runs on record anew.")] = False,
    ) -> None:
        """Run optimizers over the arena's tasks; what is on record is not made again."""
        if context.invoked_subcommand is None:
            with telling():
                numbers = [0] if quick else [int(text) for text in seeds.split(",")]
                run(task, optimizer, numbers, out, searches=not quick, processes=processes, again=again)

    @app.command()
    def variants(
        task: Annotated[list[str] | None, typer.Option(help="One of them; repeat it for each.")] = None,
        only: Annotated[
            str, typer.Option(help="scale, sorted, ablation, or single variants, with commas between them.")
        ] = "",
        seeds: Annotated[str, typer.Option(help="Numbers with commas between them.")] = "0",
        out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("runs/arena-variants"),
        processes: Annotated[int, typer.Option(help="Runs at a time, each with one thread.")] = 1,
        again: Annotated[bool, typer.Option("--again", help="Make runs on record anew.")] = False,
    ) -> None:
        """Run the default with its loss scaled, its batches sorted and its parts left out, one at a time."""
        with telling():
            numbers = [int(text) for text in seeds.split(",")]
            run_variants(task, only, numbers, out, processes=processes, again=again)

    @app.command()
    def page(
        folder: Annotated[Path, typer.Argument(help="Folder of the records.")],
        docs: Annotated[
            Path | None, typer.Option(help="Page whose generated parts are made anew: docs/arena.md.")
        ] = None,
        variants: Annotated[
            Path | None, typer.Option(help="Folder of the records of blockhf arena variants, for that page.")
        ] = None,
    ) -> None:
        """Write FOLDER/index.html and, if named, the generated parts and figures of a page."""
        from blockhf_lab.arena import page, variants_page

        with telling():
            if variants is not None and docs is None:
                raise ValueError("--variants has tables for a page alone. Name the page with --docs.")
            for path in page.write(folder, docs):
                typer.echo(f"Written: {path}")
            if variants is not None and docs is not None:
                variants_page.write(variants, docs)

    return app


def run(
    names: Sequence[str] | None,
    optimizers: Sequence[str] | None,
    seeds: Sequence[int],
    out: Path,
    *,
    searches: bool,
    processes: int,
    again: bool,
) -> None:
    """Make the runs, then the page."""
    from blockhf_lab.arena import families, page, runner, tasks

    _check(processes)
    plan = runner.Plan(
        names or list(tasks.TASKS),
        optimizers or families.NAMES,
        seeds,
        out,
        searches=searches,
        processes=processes,
        again=again,
    )
    runner.run(plan)
    for path in page.write(out, None):
        print(f"Written: {path}")


def run_variants(
    names: Sequence[str] | None, only: str, seeds: Sequence[int], out: Path, *, processes: int, again: bool
) -> None:
    """Make the runs of the default's variants, and show the tables."""
    from rich.console import Console

    from blockhf_lab import tables
    from blockhf_lab.arena import runner, tasks, variants, variants_page

    _check(processes)
    plan = runner.Plan(names or list(tasks.TASKS), (), seeds, out, processes=processes, again=again)
    variants.run(plan, [name.strip() for name in only.split(",") if name.strip()])
    found = variants_page.Variants.read(out)
    for table in (variants_page.robustness, variants_page.updates, variants_page.ablation):
        heads, rows = table(found)
        if rows:
            tables.show(Console(), heads, rows)


def _check(processes: int) -> None:
    if processes < 1:
        raise ValueError(f"--processes is {processes}, but must be at least 1.")
