"""CPU seconds for each counted gradient-equivalent (GE), over those of a plain gradient, side by side.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Operations are what the optimizer chooses by, and seconds are what its users wait for. A ratio of 1 means that
what is counted takes as long as if all of it were gradients on 6,000 samples; what is not counted, such as
work element by element, selecting samples and Python itself, makes it larger. Updates and gradients take
turns. The first update of each kind, in which products are traced and checked, is left out, and told apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from blockhf import BlockHF, NoiseScale, NoWalk, blocks, flops
from blockhf_lab import tables
from blockhf_lab.autoencoder import Autoencoder

SAMPLES = 6_000
"""Of one GE."""


def cases() -> Iterator[tuple[str, nn.Module, Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]]:
    """A name, a model, its loss and samples; random ones will do, as only costs are of interest."""
    inputs = torch.rand(10 * SAMPLES, 784)
    model = Autoencoder((784, 1000, 500, 250, 30))
    yield "the paper's autoencoder", model, lambda a, b: (a - b).square().sum(1).mean(), (inputs, inputs)
    perceptron = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))
    labels = torch.randint(0, 10, (len(inputs),))
    yield "perceptron 784-64-10", perceptron, nn.functional.cross_entropy, (inputs, labels)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=24, help="of each kind")
    number = parser.parse_args().updates
    torch.set_num_threads(1)
    rows = []
    for name, model, loss_of, (inputs, targets) in cases():
        start = [param.detach().clone() for param in model.parameters()]

        def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])  # noqa: B023
            return outputs, loss_of(outputs, batch[1])  # noqa: B023

        few = inputs[:SAMPLES], targets[:SAMPLES]

        def gradient() -> None:
            torch.autograd.grad(objective(few)[1], list(model.parameters()))  # noqa: B023

        with flops.Counter() as counter:
            gradient()
        for kind in ("small steps", "Gauss-Newton steps"):
            with torch.no_grad():
                for param, value in zip(model.parameters(), start, strict=True):
                    param.copy_(value)
            groups = blocks.by_layer(model)
            small = kind == "small steps"
            optimizer = BlockHF(groups) if small else BlockHF(groups, walk=NoWalk(), sampling=NoiseScale())
            taken, plain, ge, first = 0.0, [], 0.0, 0.0
            for update in range(number):
                plain.append(seconds_of(gradient))
                own = seconds_of(lambda: optimizer.step(objective, (inputs, targets)))  # noqa: B023
                assert optimizer.report is not None
                if update == 0:
                    first = own
                    continue
                if ("small_steps" in optimizer.report.work) == small:
                    taken, ge = taken + own, ge + optimizer.report.work["flops"] / counter.flops
            unit = sorted(plain)[len(plain) // 2]
            rows.append([name, kind, f"{ge:.1f}", f"{taken / ge / unit:.2f}", f"{first / unit:.1f}"])
    print(tables.markdown(["network", "updates", "GE", "seconds per GE", "first update, gradients"], rows))


if __name__ == "__main__":
    main()
