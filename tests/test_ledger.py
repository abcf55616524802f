"""The ledger: each kind of work is counted once, and a resumed run finds the same costs."""

from __future__ import annotations

import pytest
import torch

from blockhf import BlockHF, DoubleBackward, Formed, Traced, blocks
from blockhf.ledger import Ledger
from optimizer_tasks import Task


def test_a_count_within_a_count_is_part_of_it() -> None:
    ledger, a = Ledger(), torch.eye(3)
    with ledger.counting("outer"):
        _ = a @ a
        with ledger.counting("inner"):
            _ = a @ a
    assert ledger.totals == {"outer": 2 * 54}


def test_the_same_work_is_counted_once_and_remembered_by_its_key() -> None:
    ledger, a = Ledger(), torch.eye(3)
    for size in (3, 2, 3):
        with ledger.counting("work", size):
            _ = a[:size, :size] @ a[:size, :size]
    assert ledger.totals == {"work": 54 + 16 + 54}


def test_work_that_failed_is_not_counted_and_does_not_stop_the_ledger() -> None:
    ledger, a = Ledger(), torch.eye(3)
    with pytest.raises(RuntimeError), ledger.counting("work"):
        _ = a @ torch.eye(2)
    with ledger.counting("work"):
        _ = a @ a
    assert ledger.totals == {"work": 54}


def test_what_is_done_once_goes_under_checks() -> None:
    ledger = Ledger()
    ledger.add("product", 5)
    with ledger.once():
        ledger.add("product", 7)
        ledger.add("forward", 1)
    assert ledger.totals == {"product": 5, "checks": 8}


@pytest.mark.parametrize("products", [DoubleBackward, Traced, Formed])
def test_the_report_adds_up_and_a_resumed_step_costs_the_same_but_for_its_checks(products: type) -> None:
    reports = []
    task = Task(num_samples=200)
    optimizer = BlockHF(blocks.by_layer(task.model), products=products())
    for _ in range(2):
        optimizer.step(task.objective, task.batch)
    other = task.copy()
    resumed = BlockHF(blocks.by_layer(other.model), products=products())
    resumed.load_state_dict(optimizer.state_dict())
    for each, own in ((optimizer, task), (resumed, other)):
        each.step(own.objective, own.batch)
        assert each.report is not None
        kinds = {kind: n for kind, n in each.report.work.items() if kind.endswith("_flops")}
        kinds.pop("checks_flops", None)
        assert each.report.work["flops"] == sum(kinds.values()) > 0
        reports.append(kinds)
    assert reports[0] == reports[1]


def test_what_is_known_is_known_for_its_kind_key_and_scope_alone() -> None:
    ledger, a = Ledger(), torch.eye(3)
    ledger.begin("one objective")
    assert ledger.known("work", 3) is None
    with ledger.counting("work", 3):
        _ = a @ a
    assert ledger.known("work", 3) == 54
    assert ledger.known("work", 2) is ledger.known("other work", 3) is None
    ledger.begin("another objective")
    assert ledger.known("work", 3) is None
    with ledger.counting("work", 3):
        _ = a[:2] @ a
    assert ledger.totals == {"work": 36}
    ledger.begin("one objective")
    assert ledger.known("work", 3) == 54


def test_a_new_step_begins_with_nothing_done() -> None:
    ledger = Ledger()
    ledger.add("product", 5)
    ledger.work.num_gradients = 3
    ledger.begin(None)
    assert (ledger.total, ledger.work.num_gradients) == (0, 0)


def test_a_summary_has_passes_and_operations_and_a_total_without_checks() -> None:
    ledger = Ledger()
    ledger.add("product", 5)
    ledger.add("gradient", 2)
    ledger.work.num_gradients = 1
    with ledger.once():
        ledger.add("forward", 100)
    summary = ledger.summary()
    assert summary["flops"] == 7
    assert (summary["product_flops"], summary["checks_flops"], summary["num_gradients"]) == (5, 100, 1)


def test_checks_that_fail_are_still_put_under_checks() -> None:
    ledger, a = Ledger(), torch.eye(3)
    ledger.add("product", 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), ledger.once():
        [ledger.add("forward", 3), a @ torch.eye(2)]
    assert ledger.totals == {"product": 5, "checks": 3}
