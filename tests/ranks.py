"""Real processes for the tests of meshes: each rank is one, with gloo between them."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def start(num_ranks: int, function: str, folder: Path, *args: Any) -> list[subprocess.Popen[bytes]]:
    """Start ranks, each of which calls ``function``, written ``module:name``, with ``args``.

    What it returns is in ``folder`` when the process has ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.pickle").write_bytes(pickle.dumps(args))
    processes = []
    for rank in range(num_ranks):
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__)), function, str(folder)],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def finish(processes: Sequence[subprocess.Popen[bytes]], timeout: float = 800.0) -> list[int]:
    """Wait for all and return their exit codes; those that are late are killed."""
    end = time.monotonic() + timeout
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(end - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    return codes


def results(folder: Path, num_ranks: int) -> list[Any]:
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(num_ranks)]


def log(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.log").read_text()


def run(num_ranks: int, function: str, folder: Path, *args: Any) -> list[Any]:
    """What each rank returned; all must have ended well."""
    codes = finish(start(num_ranks, function, folder, *args))
    assert codes == [0] * num_ranks, "\n".join(log(folder, rank) for rank in range(num_ranks))
    return results(folder, num_ranks)


def main() -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    module, name = sys.argv[1].split(":")
    folder = Path(sys.argv[2])
    args = pickle.loads((folder / "args.pickle").read_bytes())
    code = 0
    try:
        found = getattr(importlib.import_module(module), name)(*args)
        (folder / f"rank{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(found))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads of gloo may outlive the interpreter, and abort it


if __name__ == "__main__":
    main()
