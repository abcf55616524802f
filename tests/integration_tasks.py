"""The examples of trainers as functions that ranks can call, with their warnings left alone."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    """The module of an example, by its path without the ending."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> Any:
    """What an example's ``main`` returns. Warnings of the frameworks are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return example(name).main(list(arguments))


def without_mesh() -> str:
    """What an optimizer of one process is told in a process group of two."""
    import torch.distributed as dist
    from torch import nn

    from blockhf import BlockHF
    from blockhf.integrations import require_mesh

    require_mesh(BlockHF(nn.Linear(2, 1).parameters()))  # no group as yet
    dist.init_process_group("gloo")
    try:
        require_mesh(BlockHF(nn.Linear(2, 1).parameters()))
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""
