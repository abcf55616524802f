"""The command line: ``blockhf demo``, ``train``, ``compare``, ``plan``, ``data``, ``bench`` and others."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import blockhf
from blockhf import __main__ as library
from blockhf_lab.arena import command

if TYPE_CHECKING:
    import typer

# What is imported from outside, and what to install for it.
_BRINGS = {
    "matplotlib": "blockhf-lab",
    "numpy": "blockhf-lab",
    "PIL": "blockhf-lab",
    "rich": "blockhf-lab",
    "tensorboard": "blockhf-lab[tensorboard]",
    "typer": "blockhf-lab",
}


def main() -> None:
    """Run the command that the command line names."""
    try:
        _app()()
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        needed = _BRINGS.get((error.name or "").split(".")[0])
        if needed is None:
            raise
        sys.exit(
            f"The command line needs {error.name}, which is not installed. "
            f"Run: python -m pip install '{needed}'"
        )


@contextlib.contextmanager
def _telling(mistakes: tuple[type[Exception], ...] = (OSError, ValueError)) -> Iterator[None]:
    """Tell what a user can mend, instead of tracing it."""
    import typer

    try:
        yield
    except mistakes as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


_MOST_PROCESSES = 4096


def _positive(value: float | None) -> float | None:
    """Check a time, where one is given."""
    import typer

    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value


def _whole(least: int, most: int = 2**63 - 1) -> Callable[[Any], Any]:
    """Check a whole number, where one is given; typer's own limits are shown as formulas."""

    def check(value: int | None) -> int | None:
        import typer

        if value is None:
            return None
        if value < least:
            raise typer.BadParameter(f"{value} is less than {least}.")
        if value > most:
            raise typer.BadParameter(f"{value} is too large; at most {most} is possible.")
        return value

    return check


# Other packages are imported in here, where the lack of one can be told; annotations see them because this
# module does not postpone the evaluation of annotations.
def _app() -> "typer.Typer":
    import typer

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Block-diagonal Hessian-free optimization.",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"blockhf {blockhf.__version__}")
            raise typer.Exit

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
            typer.Option(help="Time for each of the nine optimizers.", show_default="20, or 0.5 if quick"),
        ] = None,
        seed: Annotated[int, typer.Option(callback=_whole(0), help="Of the weights and of the batches.")] = 0,
        out: Annotated[Path, typer.Option(help="Folder for results.json and demo.png.")] = Path("runs/demo"),
        quick: Annotated[bool, typer.Option("--quick", help="A small network, in a few seconds.")] = False,
    ) -> None:
        """Train an autoencoder of digits and solve Poisson's equation, by BlockHF and others: 4 minutes."""
        from rich.console import Console

        from blockhf_lab.data import digits
        from blockhf_lab.demo import Settings, run

        options: dict[str, Any] = {"seed": seed} if seconds is None else {"seed": seed, "seconds": seconds}
        with _telling():
            settings = Settings.quick(**options) if quick else Settings(**options)
            data = digits()
        with _telling((OSError,)):
            finished = run(data, settings, out, Console())
        if not finished:
            raise typer.Exit(130)

    # The library itself answers it, with or without this package; here it is listed and completed.
    @app.command()
    def check(
        factory: Annotated[
            str, typer.Argument(metavar="MODULE.PY:FACTORY", help="It returns objective, batch and groups.")
        ],
    ) -> None:
        """Say what of one's own model does not fit, what to do about it, and what steps cost."""
        raise typer.Exit(library.check([factory]))

    _experiments(app)
    _plan(app)
    app.add_typer(_data(), name="data")
    app.add_typer(_bench(), name="bench")
    app.add_typer(command.make(_telling), name="arena")
    fuzz = _fuzz()
    _campaigns(fuzz)
    app.add_typer(fuzz, name="fuzz")
    return app


def _campaigns(fuzz: "typer.Typer") -> None:
    import typer

    Number = Annotated[int, typer.Option(callback=_whole(1), help="How many, those of the record included.")]
    Seed = Annotated[int, typer.Option(callback=_whole(0), help="Of the campaign.")]
    Seconds = Annotated[
        float | None, typer.Option(callback=_positive, help="Time to stop after; the same command goes on.")
    ]
    Out = Annotated[Path, typer.Option(help="Folder of the record.")]
    Only = Annotated[int | None, typer.Option(callback=_whole(0), help="One trial once more, by its number.")]

    def campaign(
        what: str, number: int, seed: int, seconds: float | None, out: Path, only: int | None
    ) -> None:
        from blockhf_lab.fuzz.campaign import Settings, again, failing, run

        settings = Settings(what, number, seed, float("inf") if seconds is None else seconds)
        with _telling():
            if only is not None:
                is_fine = again(settings, only, typer.echo)
            else:
                is_fine = not failing(run(settings, out, typer.echo))
        if not is_fine:
            raise typer.Exit(1)

    @fuzz.command()
    def cases(
        number: Number = 10_000,
        seed: Seed = 0,
        seconds: Seconds = None,
        out: Out = Path("results/reliability"),
        only: Only = None,
    ) -> None:
        """Random networks, losses, batches, partitions and settings, against dense matrices and promises."""
        campaign("cases", number, seed, seconds, out, only)

    @fuzz.command()
    def interrupts(
        number: Number = 1000,
        seed: Seed = 0,
        seconds: Seconds = None,
        out: Out = Path("results/reliability"),
        only: Only = None,
    ) -> None:
        """Steps that are interrupted at a random line, and what they leave behind."""
        campaign("interrupts", number, seed, seconds, out, only)

    @fuzz.command()
    def page(
        records: Annotated[Path, typer.Argument(help="Folder of the records.")],
        page: Annotated[Path, typer.Option(help="Page whose generated parts are made anew.")],
    ) -> None:
        """Put the numbers of the records into docs/reliability.md."""
        from blockhf_lab.fuzz.page import write

        with _telling():
            write(records, page)


def _experiments(app: "typer.Typer") -> None:
    import typer

    Task = Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="autoencoder, lstm or cnn; without noise: poisson2d, poisson5d, heat, burgers, allen-cahn, "
            "multiscale, inverse, curve-fit.",
        ),
    ]
    Preset = Annotated[
        str,
        typer.Option(
            help="quick (small, data included), cpu (about ten minutes a run), long (hours) or paper."
        ),
    ]
    Budget = Annotated[
        str, typer.Option(help="50updates, 20epochs, 200ge or 600s.", show_default="the preset's own")
    ]
    Stop = Annotated[
        str,
        typer.Option(
            help="budget; worse: also where the test gets worse; targets: also at the last target.",
            show_default="the preset's own",
        ),
    ]
    Data = Annotated[Path | None, typer.Option(help="Folder with the data.", show_default="the cache")]
    Threads = Annotated[
        int,
        typer.Option(
            callback=_whole(0, _MOST_PROCESSES), help="Threads to compute with.", show_default="torch's own"
        ),
    ]
    Tensorboard = Annotated[bool, typer.Option("--tensorboard", help="Log for TensorBoard too.")]

    def attempt(action: Callable[[], bool]) -> None:
        try:
            with _telling():
                finished = action()
        except KeyboardInterrupt:
            typer.echo("Ended at once; the last checkpoint stands.", err=True)
            finished = False
        if not finished:
            raise typer.Exit(130)

    @app.command()
    def train(
        task: Task,
        optimizer: Annotated[
            str, typer.Option(help="name:option=value,option=value, e.g. adam:lr=1e-3,batch=600.")
        ] = "blockhf",
        preset: Preset = "quick",
        seed: Annotated[int, typer.Option(callback=_whole(0), help="Of the weights and of the batches.")] = 0,
        budget: Budget = "",
        stop: Stop = "",
        out: Annotated[
            Path | None, typer.Option(help="Folder of the run.", show_default="runs/TASK-PRESET/…")
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
        data: Data = None,
        threads: Threads = 0,
        tensorboard: Tensorboard = False,
        ranks: Annotated[
            int,
            typer.Option(
                callback=_whole(1, _MOST_PROCESSES), help="Processes of this machine to train with."
            ),
        ] = 1,
        mesh: Annotated[
            str | None,
            typer.Option(help="How they share the work: BLOCKxDATA.", show_default="best for the blocks"),
        ] = None,
        restarts: Annotated[
            int, typer.Option(callback=_whole(0), help="How often to start again if one fails.")
        ] = 0,
    ) -> None:
        """Train a task by one optimizer: blockhf (the default), paper, hf, or any of torch.optim."""
        from rich.console import Console

        from blockhf_lab import commands, runs
        from blockhf_lab import ranks as processes

        config = runs.Config(task, preset, optimizer, seed, budget, stop, threads, mesh=mesh)
        if ranks > 1 and not processes.is_one_of_many():
            with _telling():
                config.complete()  # once, and not in each of the processes
                runs.check_free(out or commands.run_folder(config), resume=resume)
            raise typer.Exit(processes.launch(ranks, restarts, sys.argv[1:]))
        attempt(
            lambda: commands.train(config, out, Console(), resume=resume, data=data, tensorboard=tensorboard)
        )

    @app.command()
    def compare(
        task: Task,
        optimizer: Annotated[
            list[str] | None,
            typer.Option(
                help="One of them; repeat it for each.",
                show_default="BlockHF and those of the paper's figure",
            ),
        ] = None,
        seeds: Annotated[str, typer.Option(help="Numbers with commas between them.")] = "0",
        preset: Preset = "quick",
        budget: Budget = "",
        stop: Stop = "",
        out: Annotated[
            Path | None, typer.Option(help="Folder of the comparison.", show_default="runs/TASK-PRESET")
        ] = None,
        data: Data = None,
        threads: Threads = 0,
        tensorboard: Tensorboard = False,
    ) -> None:
        """Train a task by several optimizers, over several seeds; write tables, figures and a page.

        What is finished is kept, what was interrupted goes on.
        """
        from rich.console import Console

        from blockhf_lab import commands, tasks
        from blockhf_lab.runs import Config

        def run() -> bool:
            specs = optimizer or tasks.get(task, preset).figure()
            configs = [
                Config(task, preset, spec, seed, budget, stop, threads)
                for seed in _seeds(seeds)
                for spec in specs
            ]
            folder = out or Path("runs") / f"{task}-{preset}"
            return commands.compare(configs, folder, Console(), data=data, tensorboard=tensorboard)

        attempt(run)

    @app.command()
    def race(
        task: Task,
        names: Annotated[
            list[str] | None,
            typer.Option("--family", help="One of them; repeat it for each.", show_default="all"),
        ] = None,
        seeds: Annotated[str, typer.Option(help="Numbers with commas between them.")] = "0,1,2",
        preset: Preset = "quick",
        search: Annotated[
            str,
            typer.Option(
                help="Budget of each setting in the search.", show_default="40ge, or seconds without noise"
            ),
        ] = "",
        budget: Annotated[
            str,
            typer.Option(help="Budget of each final run.", show_default="200ge, or seconds without noise"),
        ] = "",
        out: Annotated[
            Path | None, typer.Option(help="Folder of the race.", show_default="runs/race-TASK-PRESET")
        ] = None,
        data: Data = None,
        threads: Threads = 0,
    ) -> None:
        """Race optimizers, each with settings found by an equal search, to targets of the train loss.

        What is finished is kept, what was interrupted goes on.
        """
        from rich.console import Console

        from blockhf_lab import race, tasks

        def run() -> bool:
            chosen = tasks.get(task, preset)
            plan = race.Plan(
                task,
                preset,
                names or list(race.families(chosen)),
                _seeds(seeds),
                search or chosen.race_search,
                budget or chosen.race_budget,
                threads,
            )
            return race.run(plan, chosen, out or Path("runs") / f"race-{task}-{preset}", Console(), data=data)

        attempt(run)

    @app.command()
    def figures(
        runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or files comparison.json.")],
        out: Annotated[
            Path | None, typer.Option(help="Folder for the figures.", show_default="the first of them")
        ] = None,
    ) -> None:
        """Draw the figures and the page of runs again."""
        from rich.console import Console

        from blockhf_lab import commands

        with _telling():
            commands.redraw(runs, out, Console())

    @app.command()
    def gallery(
        runs: Annotated[Path, typer.Argument(help="Folder with a folder of runs for each task.")],
        records: Annotated[Path, typer.Option(help="Where to put the evaluated points.")] = Path(
            "results/physics"
        ),
        page: Annotated[
            Path, typer.Option(help="Page whose generated parts and figures are made anew.")
        ] = Path("docs/gallery/physics.md"),
    ) -> None:
        """Draw solutions, errors and convergence of the tasks without noise, and fill their page."""
        from blockhf_lab.physics import gallery

        with _telling():
            typer.echo(f"Drawn: {', '.join(gallery.run(runs, records, page))}")

    @app.command()
    def claims(
        records: Annotated[Path, typer.Argument(help="Folder of the records.")] = Path("results/claims"),
        long: Annotated[
            Path | None,
            typer.Option(help="Folder of long runs, which judge where they have two seeds: results/long."),
        ] = None,
        page: Annotated[
            Path | None,
            typer.Option(help="Page whose generated parts and figures are made anew: docs/claims.md."),
        ] = None,
    ) -> None:
        """Judge the paper's seven claims by the records of its experiments."""
        from rich.console import Console

        from blockhf_lab import claims_page

        with _telling():
            claims_page.run(records, long, page, Console())

    @app.command()
    def readme(
        page: Annotated[Path, typer.Argument(help="The README.")] = Path("README.md"),
        records: Annotated[Path, typer.Option(help="Records of its table and figure.")] = Path(
            "results/race-autoencoder/comparison.json"
        ),
        image: Annotated[Path, typer.Option(help="The figure.")] = Path("docs/images/race.png"),
    ) -> None:
        """Make figure, table and printed report of the README anew."""
        from rich.console import Console

        from blockhf_lab import readme

        with _telling():
            readme.run(page, records, image, Console())


def _plan(app: "typer.Typer") -> None:
    import typer

    @app.command()
    def plan(
        task: Annotated[
            str,
            typer.Argument(
                metavar="TASK", help="autoencoder, lstm, cnn or transformer.", show_default="--parameters"
            ),
        ] = "",
        blocks: Annotated[
            str,
            typer.Option(help="single, module, layer, or how many.", show_default="the task's own, or layer"),
        ] = "",
        parameters: Annotated[
            float | None, typer.Option(help="Of a transformer that need not exist, e.g. 1e9.")
        ] = None,
        layers: Annotated[int, typer.Option(help="Of that transformer.")] = 24,
        tokens: Annotated[int, typer.Option(help="Of a sample of that transformer.")] = 2048,
        gradient_batch: Annotated[
            int | None, typer.Option(help="Samples of the gradient.", show_default="the task's own, or 512")
        ] = None,
        curvature_batch: Annotated[
            int | None, typer.Option(help="Samples of the curvature.", show_default="the task's own, or 64")
        ] = None,
        cg_steps: Annotated[
            int | None, typer.Option(help="CG iterations.", show_default="the task's own, or 30")
        ] = None,
        micro_batch: Annotated[
            int | None, typer.Option(help="Samples in memory at a time.", show_default="all")
        ] = None,
        ranks: Annotated[
            int | None, typer.Option(help="How many; their best mesh.", show_default="2")
        ] = None,
        block: Annotated[int | None, typer.Option(help="The mesh itself: ranks along block.")] = None,
        data: Annotated[int | None, typer.Option(help="The mesh itself: ranks along data.")] = None,
        bandwidth: Annotated[
            str, typer.Option(help="Between ranks, in GB/s; several with commas between them.")
        ] = "25",
        latency: Annotated[str, typer.Option(help="Of a message, in microseconds; one or as many.")] = "10",
        flops: Annotated[
            float | None,
            typer.Option(help="Floating point operations a second of a rank.", show_default="measured here"),
        ] = None,
        memory_bandwidth: Annotated[float, typer.Option(help="Of a rank, in GB/s, with --flops.")] = 1000.0,
        efficiency: Annotated[
            float, typer.Option(help="What a rank keeps of its speed while all others work.")
        ] = 1.0,
        threads: Annotated[
            int,
            typer.Option(
                callback=_whole(0, _MOST_PROCESSES), help="To measure with.", show_default="torch's own"
            ),
        ] = 0,
        json: Annotated[Path | None, typer.Option("--json", help="File for the numbers.")] = None,
        plot: Annotated[Path | None, typer.Option(help="File for the figure, as PNG and SVG.")] = None,
    ) -> None:
        """Predict work, memory, messages, time and speed-up of an update on a mesh, beside Adam's."""
        import torch
        from rich.console import Console

        from blockhf_lab.planning import Request, run

        if threads:
            torch.set_num_threads(threads)
        with _telling():
            request = Request(
                task=task,
                blocks=blocks,
                parameters=parameters,
                layers=layers,
                tokens=tokens,
                gradient_batch=gradient_batch,
                curvature_batch=curvature_batch,
                cg_steps=cg_steps,
                micro_batch=micro_batch,
                ranks=ranks,
                block=block,
                data=data,
                bandwidths=_numbers("bandwidth", bandwidth),
                latencies=_numbers("latency", latency),
                flops=flops,
                memory_bandwidth=memory_bandwidth,
                efficiency=efficiency,
            )
            run(request, Console(), out=json, plot=plot)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}, but must be a number, or some with commas between.") from None


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",") if seed.strip()]
    except ValueError:
        raise ValueError(f"Cannot read the seeds {text!r}. Write 0,1,2.") from None
    if not seeds:
        raise ValueError("There is no seed. Write --seeds 0,1,2.")
    return seeds


def _data() -> "typer.Typer":
    import typer

    data = typer.Typer(no_args_is_help=True, help="The data of the experiments.")

    @data.callback()
    def common() -> None:
        pass

    @data.command()
    def fetch(
        names: Annotated[list[str], typer.Argument(help="mnist, cifar10 or both.")],
        out: Annotated[
            Path | None,
            typer.Option(help="Folder to put it in.", show_default="BLOCKHF_DATA, or the user's cache"),
        ] = None,
    ) -> None:
        """Fetch MNIST and CIFAR-10 from wherever they can be had, and verify them."""
        from rich.console import Console

        from blockhf_lab import commands

        try:
            with _telling():
                commands.fetch_data(names, out, Console())
        except KeyboardInterrupt as error:
            typer.echo("Interrupted; nothing was kept of what was under way. Run it again.", err=True)
            raise typer.Exit(130) from error

    return data


def _bench() -> "typer.Typer":
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
    Seed = Annotated[int, typer.Option(callback=_whole(0), help="Of weights and samples.")]
    Json = Annotated[Path | None, typer.Option("--json", help="File for the numbers.")]

    def measure(what: str, networks: str, out: Path | None, **options: Any) -> None:
        from rich.console import Console

        from blockhf_lab.bench import Options, run

        names = tuple(name.strip() for name in networks.split(",") if name.strip())
        with _telling():
            finished = run(what, Options(names, **options), out, Console())
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
        device: Annotated[str, typer.Option(help="Where to measure, e.g. cuda.")] = "cpu",
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
            device=device,
        )

    @bench.command()
    def step(
        networks: Networks = "",
        samples: Samples = None,
        repetitions: Repetitions = 7,
        threads: Threads = None,
        seed: Seed = 0,
        json: Json = None,
        everything: Annotated[
            bool, typer.Option("--all", help="The largest curvature batch and the residual network too.")
        ] = False,
    ) -> None:
        """An update of HF, block HF and Adam at the paper's settings."""
        measure(
            "step",
            networks,
            json,
            samples=samples,
            repetitions=repetitions,
            threads=threads,
            seed=seed,
            everything=everything,
        )

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

    @bench.command()
    def mesh(
        ranks: Annotated[int, typer.Option(help="Processes of one thread: 2, or 4 to measure both.")] = 2,
        curvature: Annotated[int, typer.Option(help="Samples of the curvature.")] = 1200,
        cg_steps: Annotated[int, typer.Option(help="CG iterations.")] = 30,
        repetitions: Repetitions = 7,
        seed: Seed = 0,
        json: Json = None,
        small: Annotated[bool, typer.Option("--small", help="A small network, to try it out.")] = False,
        page: Annotated[
            Path | None, typer.Option(help="Page of the documentation to put the table into.")
        ] = None,
    ) -> None:
        """Updates on one rank and on several, beside what the machine allows and what plan predicts."""
        from rich.console import Console

        from blockhf_lab.benchmesh import Settings, run

        with _telling():
            run(Settings(ranks, curvature, cg_steps, repetitions, seed, small), json, Console(), page)

    @bench.command()
    def nist(
        problems: Annotated[
            str, typer.Option(help="Names with commas between them.", show_default="all 27")
        ] = "",
        json: Json = None,
        page: Annotated[
            Path | None, typer.Option(help="Page to put the table into: docs/gallery/curve-fits.md.")
        ] = None,
    ) -> None:
        """Certified digits of blockhf.least_squares on NIST's nonlinear regressions, beside scipy's."""
        from rich.console import Console

        from blockhf_lab.nist import bench

        with _telling():
            bench.run(problems.split(",") if problems else None, json, page, Console())

    return bench


def _fuzz() -> "typer.Typer":
    import typer

    fuzz = typer.Typer(no_args_is_help=True, help="Look for faults by chance.")

    @fuzz.callback()
    def common() -> None:
        pass

    @fuzz.command()
    def kills(
        number: Annotated[int, typer.Option(callback=_whole(1), help="How often runs are ended.")] = 500,
        seed: Annotated[int, typer.Option(callback=_whole(0), help="Of the moments.")] = 0,
        out: Annotated[Path, typer.Option(help="Folder for kills.json and cases.jsonl.")] = Path(
            "runs/fuzz-kills"
        ),
    ) -> None:
        """Kill runs at random moments, resume them, and compare them with undisturbed ones.

        What is done is kept; the same command goes on.
        """
        from rich.console import Console

        from blockhf_lab import fuzz_runs

        with _telling():
            is_well = fuzz_runs.kills(number, seed, out, Console())
        if not is_well:
            raise typer.Exit(1)

    return fuzz
