"""What a product and an update cost, in gradients on the same samples.

    python benchmarks/costs.py [--samples 1200] [--repetitions 7] [--json FILE]

Everything is measured side by side in one run, in turns, and the best of the repetitions counts: an
absolute time says more about the machine than about the code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from blockhf import BlockHF, GaussNewton, blocks
from blockhf.blocks import Block
from blockhf.curvature import linearize
from blockhf.experiments.autoencoder import Autoencoder, objective_of
from blockhf.objective import Problem


def best(candidates: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """The least time of each candidate, all of them run in turns."""
    seconds = dict.fromkeys(candidates, float("inf"))
    for _ in range(repetitions + 1):  # the first round warms up and counts like any other
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def products(samples: int, repetitions: int) -> dict[str, float]:
    """Cost of a Gauss-Newton product of each block, in gradients on the same samples."""
    torch.manual_seed(0)
    model = Autoencoder()
    objective, batch = objective_of(model), torch.rand(samples, 784)
    params = list(model.parameters())
    candidates: dict[str, Callable[[], Any]] = {
        "gradient": lambda: torch.autograd.grad(objective(batch)[1], params)
    }
    for label, groups in (("one block", blocks.single(model)), ("two blocks", blocks.by_module(model))):
        own = [Block(group["name"], tuple(param for _, param in group["params"])) for group in groups]
        problem = Problem(objective, batch, own)
        problem.differentiate()
        matrix = linearize(GaussNewton(), problem)
        for index, block in enumerate(own):
            vector = torch.randn(block.size)
            candidates[f"product, {label}: {block.name}"] = (
                lambda matrix=matrix, index=index, vector=vector: matrix.product(index, index, vector)
            )
    seconds = best(candidates, repetitions)
    return {name: value / seconds["gradient"] for name, value in seconds.items()}


def updates(samples: int, repetitions: int) -> dict[str, float]:
    """Time of an update of block HF and of HF at the paper's settings, HF being 1."""
    batch = torch.rand(6000, 784)
    candidates = {}
    for name, partition in (("HF", blocks.single), ("block HF", blocks.by_module)):
        torch.manual_seed(0)
        model = Autoencoder()
        optimizer = BlockHF.paper(partition(model), curvature_batch_size=samples)
        objective = objective_of(model)
        candidates[name] = lambda optimizer=optimizer, objective=objective: optimizer.step(objective, batch)
    seconds = best(candidates, max(2, repetitions // 2))
    return {name: value / seconds["HF"] for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": 0,
        "samples": options.samples,
        "products, in gradients": products(options.samples, options.repetitions),
        "updates, in updates of HF": updates(options.samples, options.repetitions),
    }
    print(json.dumps(results, indent=2))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
