"""``python -m blockhf_lab.arena.quicklook TASK``: the default on one task, beside the stored runs of peers.

For each evaluation it tells how long the fastest peer on record took to the same loss, and the ratio.
``--set`` gives options of ``BlockHF`` as in ``--optimizer blockhf:...``, and ``batch=``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from blockhf import BlockHF
from blockhf_lab.arena import records, tasks, tuned
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.training import Method, Point, train
from blockhf_lab.optimizers import Spec

RECORDS = Path(__file__).parents[4] / "results" / "arena"
"""Where the repository has its records."""


def fastest(peers: Sequence[Record], loss: float) -> tuple[Point, str] | None:
    """The least CPU seconds of a peer to a loss, and its optimizer."""
    found = [(point, peer.optimizer) for peer in peers if (point := peer.first(loss)) is not None]
    return min(found, key=lambda pair: pair[0].seconds, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(tasks.TASKS))
    parser.add_argument("--seconds", type=float, help="CPU seconds of updates; the task's own if not named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="options of BlockHF")
    parser.add_argument("--optimizer", help="another optimizer, as adamw:lr=1e-3,batch=64")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--report", action="store_true", help="print each evaluated step's report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = tasks.get(arguments.task)
    spec = Spec.parse(arguments.optimizer or "blockhf:" + ",".join(arguments.set))
    peers = [
        record
        for record in records.read(arguments.records)
        if record.task == task.name and record.family not in ("blockhf", str(spec))
    ]
    print(f"{task.title}\n{spec}, seed {arguments.seed}, {len(peers)} runs of peers on record")
    print(f"{'update':>7} {'GE':>9} {'CPU s':>8} {'loss':>10} {'peer CPU s':>11} {'ratio':>6}  fastest peer")

    def show(point: Point, method: Method) -> None:
        ge = "–" if point.ge is None else f"{point.ge:.2f}"
        line = f"{point.update:7d} {ge:>9} {point.seconds:8.2f} {point.loss:10.5g}"
        if (best := fastest(peers, point.loss)) is not None:
            ratio = point.seconds / best[0].seconds if best[0].seconds else math.inf
            line += f" {best[0].seconds:11.2f} {ratio:6.2f}  {best[1]}"
        print(line, flush=True)
        if arguments.report and isinstance(method.optimizer, BlockHF):
            print(method.optimizer.report, flush=True)

    data = task.load()
    seconds = arguments.seconds or task.seconds
    result = train(task, data, spec, arguments.seed, seconds, on_point=show)
    print(f"{result['status']}; test loss {result['test']}")
    points = [Point(*point) for point in result["points"]]
    for target in tuned.targets(task.name):
        own = next((point for point in points if point.loss <= target), None)
        best = fastest(peers, target)
        told = "not reached" if own is None else f"{own.seconds:.2f} s, {own.update} updates"
        peer = "no peer" if best is None else f"peer {best[0].seconds:.2f} s ({best[1]})"
        ratio = "" if own is None or best is None else f", ratio {own.seconds / best[0].seconds:.2f}"
        print(f"target {target:g}: {told}; {peer}{ratio}")


if __name__ == "__main__":
    main()
