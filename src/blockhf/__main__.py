"""The command ``blockhf``, and ``python -m blockhf``.

The library itself knows its version and ``blockhf check``. All else is in a package beside it, which says by
an entry point of the group ``blockhf.commands`` that it is there.
"""

import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

import blockhf

_GROUP = "blockhf.commands"


def main() -> None:
    """Run the command that the command line names."""
    if sys.argv[1:] == ["--version"]:
        print(f"blockhf {blockhf.__version__}")
        sys.exit(0)
    if sys.argv[1:2] == ["check"]:
        sys.exit(check(sys.argv[2:]))
    for command in entry_points(group=_GROUP, name="main"):
        command.load()()
        return
    print(
        "Error: The commands of blockhf are in the package blockhf-lab, which is not installed. "
        "Install it from a clone of the repository: python -m pip install . ./lab",
        file=sys.stderr,
    )
    sys.exit(2)


def check(arguments: list[str]) -> int:
    """``blockhf check module.py:factory``; the factory returns objective, batch and groups."""
    path, _, name = (arguments[0] if len(arguments) == 1 else "").rpartition(":")
    if not path:
        print(
            "Usage: blockhf check module.py:factory\n\nThe factory takes no arguments and returns objective, "
            "batch and groups,\nand as a fourth, if you like, options of blockhf.check by their names."
        )
        return 0 if arguments in (["--help"], ["-h"]) else 2
    try:
        sys.path.insert(0, str(Path(path).resolve().parent))
        factory = runpy.run_path(path)[name]
    except (OSError, KeyError) as error:
        print(f"Error: There is no {name!r} in {path!r}: {error}.", file=sys.stderr)
        return 2
    objective, batch, groups, *options = factory()
    report = blockhf.check(objective, batch, groups, **(options[0] if options else {}))
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    main()
