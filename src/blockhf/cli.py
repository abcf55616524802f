"""The command line: ``blockhf demo``, ``blockhf bench`` and ``blockhf --version``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import blockhf

if TYPE_CHECKING:
    import typer

_EXTRAS = ("matplotlib", "rich", "typer")


def main() -> None:
    """Run the command that the command line names."""
    try:
        _app()()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _EXTRAS:
            raise
        sys.exit(
            f"The command line needs {error.name}, which is not installed. "
            "Run: python -m pip install 'blockhf[experiments]'"
        )


# The extras are imported in here, where the lack of one can be told; annotations see them because this
# module does not postpone the evaluation of annotations.
def _app() -> "typer.Typer":
    import typer

    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Block-diagonal Hessian-free optimization.",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"blockhf {blockhf.__version__}")
            raise typer.Exit

    def fail(error: Exception) -> NoReturn:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error

    @app.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        pass

    @app.command()
    def demo(
        seconds: Annotated[
            float | None,
            typer.Option(help="Time for each of the four optimizers.", show_default="26, or 0.5 if quick"),
        ] = None,
        seed: Annotated[
            int, typer.Option(min=0, max=2**63 - 1, help="Of the weights and of the batches.")
        ] = 0,
        out: Annotated[Path, typer.Option(help="Folder for results.json and demo.png.")] = Path("runs/demo"),
        quick: Annotated[bool, typer.Option("--quick", help="A small network, in a few seconds.")] = False,
    ) -> None:
        """Train an autoencoder of handwritten digits by block HF, HF and Adam, in about two minutes."""
        from rich.console import Console

        from blockhf.experiments.data import digits
        from blockhf.experiments.demo import Settings, run

        options: dict[str, Any] = {"seed": seed} if seconds is None else {"seed": seed, "seconds": seconds}
        try:
            settings = Settings.quick(**options) if quick else Settings(**options)
            data = digits()
        except (OSError, ValueError) as error:
            fail(error)
        try:
            finished = run(data, settings, out, Console())
        except OSError as error:
            fail(error)
        if not finished:
            raise typer.Exit(130)

    app.add_typer(_bench(fail), name="bench")
    return app


def _bench(fail: Callable[[Exception], NoReturn]) -> "typer.Typer":
    import typer

    bench = typer.Typer(no_args_is_help=True, help="Measure what products and updates cost.")
    Networks = Annotated[
        str, typer.Option(help="Names with commas between them.", show_default="all that it is for")
    ]
    Samples = Annotated[
        int | None, typer.Option(help="Fewer samples, to try it out.", show_default="each network's own")
    ]
    Repetitions = Annotated[int, typer.Option(help="Turns of each candidate; the best one counts.")]
    Threads = Annotated[int | None, typer.Option(help="Threads to compute with.", show_default="torch's own")]
    Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and samples.")]
    Json = Annotated[Path | None, typer.Option("--json", help="File for the numbers.")]

    def measure(what: str, networks: str, out: Path | None, **options: Any) -> None:
        from rich.console import Console

        from blockhf.experiments.bench import Options, run

        names = tuple(name.strip() for name in networks.split(",") if name.strip())
        try:
            finished = run(what, Options(names, **options), out, Console())
        except (OSError, ValueError) as error:
            fail(error)
        if not finished:
            raise typer.Exit(130)

    @bench.command()
    def products(
        networks: Networks = "",
        samples: Samples = None,
        repetitions: Repetitions = 7,
        threads: Threads = None,
        seed: Seed = 0,
        json: Json = None,
        compile: Annotated[bool, typer.Option("--compile", help="Compiled products too: minutes.")] = False,
        everything: Annotated[bool, typer.Option("--all", help="Trace the LSTM too: minutes.")] = False,
        profile: Annotated[bool, typer.Option("--profile", help="And where CG's time goes.")] = False,
    ) -> None:
        """A Gauss-Newton product, in gradients, by this library and by those that are installed."""
        measure(
            "products",
            networks,
            json,
            samples=samples,
            repetitions=repetitions,
            threads=threads,
            seed=seed,
            compile=compile,
            everything=everything,
            profile=profile,
        )

    @bench.command()
    def step(
        networks: Networks = "",
        samples: Samples = None,
        repetitions: Repetitions = 7,
        threads: Threads = None,
        seed: Seed = 0,
        json: Json = None,
    ) -> None:
        """An update of HF, block HF and Adam at the paper's settings."""
        measure("step", networks, json, samples=samples, repetitions=repetitions, threads=threads, seed=seed)

    @bench.command()
    def memory(
        networks: Networks = "",
        samples: Samples = None,
        repetitions: Repetitions = 7,
        threads: Threads = None,
        seed: Seed = 0,
        json: Json = None,
    ) -> None:
        """Memory of the products with and without micro-batches."""
        measure(
            "memory", networks, json, samples=samples, repetitions=repetitions, threads=threads, seed=seed
        )

    return bench
