"""The gallery's page of examples, from what they print and return (``python -m`` this module)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blockhf_lab import figures, files

ROOT = Path(__file__).parents[3]
SOURCES = "https://github.com/blockhf/blockhf/blob/main/examples"
TITLES = {
    "mlp": "One's own network",
    "resnet": "A ResNet with BatchNorm",
    "gpt": "A GPT",
    "lora": "LoRA on a frozen network",
    "vae": "A variational autoencoder",
    "infonce": "Embeddings by InfoNCE",
    "policy": "Policy optimization",
    "direction": "In front of other optimizers",
}
INTRODUCTION = f"""\
# Examples

Scripts that run as they stand, each in less than two minutes on two cores, in
[`examples/`]({SOURCES.replace("blob", "tree")}). Pictures and lines below are what they returned and
printed with one thread.
`python -m blockhf_lab.examples_page` makes this page anew. Those of trainers are in
[Lightning, Accelerate, Trainer, Ignite](../howto/trainers.md).
"""


def run(name: str, arguments: list[str]) -> tuple[Any, str, Any]:
    """An example's module, what it printed, and what it returned."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = module.main(arguments)
    return module, printed.getvalue(), found


def section(name: str, docstring: str, printed: str) -> str:
    """Words, picture and the last lines of one example."""
    words = re.sub(r"``python \S+``", "", docstring).replace("``", "`").strip()
    lines = printed.strip().splitlines()
    shown = lines if len(lines) < 7 else [*lines[:1], "…", *lines[-2:]]
    return "\n".join(
        [
            f"## {TITLES[name]}",
            "",
            words,
            "",
            f"![{TITLES[name]}](images/example-{name}.png)",
            "",
            "```console",
            f"$ python examples/{name}.py",
            *shown,
            "```",
            "",
            f"[The script]({SOURCES}/{name}.py)",
            "",
        ]
    )


def picture(name: str, module: Any, found: Any) -> Figure:
    """The curve of an example, and beside it what it learned where that can be seen."""
    draws = {"mlp": _regions, "vae": _reconstructions, "resnet": _images}
    figure = Figure(figsize=(7.2, 2.9) if name in draws else (4.6, 2.9), dpi=110, layout="constrained")
    if name == "direction":
        _bars(figure.subplots(), found)
        return figure
    axes = figure.subplots(1, 2) if name in draws else [figure.subplots()]
    values = found.get("losses") or found["times"]
    axes[0].plot(range(1, len(values) + 1), values, color=figures.look(1)[0], linewidth=2)
    if "losses" in found:
        figures.scale_errors(axes[0], values)
        if max(values) > 30 * min(values):  # there is no room for more
            figures.plain_ticks(axes[0], digits=(1,))
    axes[0].set(xlabel="steps", ylabel="loss" if "losses" in found else "steps that poles stand for")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].grid(color="#dddddd", linewidth=0.6)
    axes[0].spines[["top", "right"]].set_visible(False)
    if name in draws:
        with torch.no_grad():
            draws[name](axes[1], module, found["model"])
    return figure


def _regions(axes: Axes, module: Any, model: Any) -> None:
    """To which arm of the spirals the network counts each point."""
    line = torch.linspace(-1.1, 1.1, 200)
    points = torch.cartesian_prod(line, line)
    classes = model(points).argmax(1).reshape(200, 200).T
    colors = [figures.look(1 + arm)[0] for arm in range(3)]
    axes.contourf(line, line, classes, levels=[-0.5, 0.5, 1.5, 2.5], colors=colors, alpha=0.25)
    inputs, arms = module.spirals(600, torch.Generator().manual_seed(9))
    axes.scatter(inputs[:, 0], inputs[:, 1], c=[colors[int(arm)] for arm in arms], s=3)
    axes.set(aspect="equal", xticks=[], yticks=[], title="what it tells apart")


def _reconstructions(axes: Axes, module: Any, model: Any) -> None:
    """Pictures, and below them what comes back."""
    pictures = module.bars(9, 6, torch.Generator().manual_seed(9))
    rows = [pictures, torch.sigmoid(model(pictures)[0])]
    padded = [torch.nn.functional.pad(row.view(-1, 6, 6), (1, 1, 1, 1), value=0.5) for row in rows]
    image = torch.cat([torch.cat(list(row), dim=1) for row in padded])
    axes.imshow(image, cmap="gray", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[3.5, 11.5], yticklabels=["given", "returned"], title="new pictures")
    axes.tick_params(length=0)


def _images(axes: Axes, module: Any, model: Any) -> None:
    """Images with the classes that the network gives them; wrong ones are crossed out."""
    images, classes = module.images(15, 16, seed=99)
    wrong = model(images).argmax(1) != classes
    scaled = ((images - images.amin()) / (images.amax() - images.amin())).permute(0, 2, 3, 1)
    scaled = torch.nn.functional.pad(scaled, (0, 0, 1, 1, 1, 1), value=1.0)
    axes.imshow(torch.cat([torch.cat(list(row), dim=1) for row in torch.split(scaled, 5)]))
    for place in torch.nonzero(wrong).flatten().tolist():
        axes.plot(18 * (place % 5) + 9, 18 * (place // 5) + 9, "x", color="red", markersize=14)
    axes.set(xticks=[], yticks=[], title=f"new images, {int(wrong.sum())} of {len(wrong)} taken for another")


def _bars(axes: Axes, found: dict[str, float]) -> None:
    names = list(found)
    colors = itertools.cycle([figures.look(4)[0], figures.look(1)[0]])
    axes.barh(names, list(found.values()), color=[color for color, _ in zip(colors, names, strict=False)])
    axes.set(xlabel="loss on new samples")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def main(folder: Path = ROOT / "docs" / "gallery", arguments: dict[str, list[str]] | None = None) -> None:
    """Run the examples, one after the other, and write page and pictures."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION]
    for name in TITLES if arguments is None else arguments:
        module, printed, found = run(name, (arguments or {}).get(name, []))
        files.write(folder / "images" / f"example-{name}.png", figures.png(picture(name, module, found)))
        parts.append(section(name, module.__doc__, printed))
    files.write(folder / "examples.md", "\n".join(parts).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
