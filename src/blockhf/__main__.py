"""The command ``blockhf``, and ``python -m blockhf``.

The library itself knows its version only. All else is in a package beside it, which says by an entry point of
the group ``blockhf.commands`` that it is there.
"""

import sys
from importlib.metadata import entry_points

import blockhf

_GROUP = "blockhf.commands"


def main() -> None:
    """Run the command that the command line names."""
    if sys.argv[1:] == ["--version"]:
        print(f"blockhf {blockhf.__version__}")
        sys.exit(0)
    for command in entry_points(group=_GROUP, name="main"):
        command.load()()
        return
    print(
        "Error: The commands of blockhf are in the package blockhf-lab, which is not installed. "
        "Install it from a clone of the repository: python -m pip install . ./lab",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
