"""Why an objective cannot be traced or run sample by sample: torch's errors in our words."""

from __future__ import annotations

from blockhf._torch import MissingInTorchError
from blockhf.fx_graphs import TracingError

_READS = "the objective reads numbers out of tensors, by .item(), float() or a condition in Python"
_SIZES = "the sizes of its tensors depend on their values, as with masks and nonzero()"
_WORDS = {
    "mutate a captured Tensor": "its forward pass writes to a buffer, as that of BatchNorm does in training",
    "more than 1 value per channel": "BatchNorm in training lets samples see each other",
    "in randomness error mode": "its forward pass draws random numbers, as that of dropout does in training",
    "Could not guard on data-dependent": _READS,
    "_local_scalar_dense": _READS,
    "calling .item()": _READS,
    "data-dependent control flow": _READS,
    "dynamic shape": _SIZES,
    "Dynamic shapes": _SIZES,
    "Batching rule not implemented": "torch has no rule that runs one of its operations on single samples",
}
_LONGEST = 120


def in_words(error: Exception) -> str:
    """The reason in a clause; what has no words here is quoted, in short.

    >>> in_words(RuntimeError("vmap: called random operation while in randomness error mode. Please ..."))
    'its forward pass draws random numbers, as that of dropout does in training'
    >>> in_words(RuntimeError("something new"))
    'torch reports RuntimeError, something new'
    """
    said = str(error).strip()
    if isinstance(error, (MissingInTorchError, TracingError)):
        return said  # these are ours
    for part, words in _WORDS.items():
        if part in said:
            return words
    first = said.splitlines()[0] if said else ""
    first = first if len(first) <= _LONGEST else first[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return f"torch reports {type(error).__name__}" + (f", {first}" if first else "")
