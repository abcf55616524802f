"""``blockhf arena`` and ``blockhf arena page``."""

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
    def page(
        folder: Annotated[Path, typer.Argument(help="Folder of the records.")],
        docs: Annotated[
            Path | None, typer.Option(help="Page whose generated parts are made anew: docs/arena.md.")
        ] = None,
    ) -> None:
        """Write FOLDER/index.html and, if named, the generated parts and figures of a page."""
        from blockhf_lab.arena import page

        with telling():
            for path in page.write(folder, docs):
                typer.echo(f"Written: {path}")

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

    if processes < 1:
        raise ValueError(f"--processes is {processes}, but must be at least 1.")
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
