"""Held-out samples come in few sizes, as products are traced anew for each."""

from __future__ import annotations

from blockhf import Subspace


def test_held_out_samples_come_in_few_sizes() -> None:
    search = Subspace()
    numbers = {search.num_held_out(60_000, wanted) for wanted in range(600, 59_000, 7)}
    assert numbers == {256, 512, 768, 1024, 1280, 1536, 1792}
