"""An optimizer that knows of one process, where a trainer has started two."""

from __future__ import annotations

from pathlib import Path

import ranks
from children import starts_processes


@starts_processes
def test_an_optimizer_without_a_mesh_is_refused_where_there_are_two_processes(tmp_path: Path) -> None:
    for message in ranks.run(2, "integration_tasks:without_mesh", tmp_path):
        assert "There are 2 processes, but the optimizer has mesh=None" in message
        assert "Pass mesh=data_mesh() to BlockHF" in message
