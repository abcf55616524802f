"""The ways to a product: traced and formed, against the same dense matrices as the double backward."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from test_curvature import (
    CASES,
    ONE_PER_NETWORK,
    PARTITIONS,
    RTOL,
    dense_gauss_newton,
    dense_hessian,
    linearized,
    table,
)

from blockhf.curvature import Formed, GaussNewton, Hessian, Traced
from blockhf.curvature.dense import FormingError


@pytest.mark.parametrize("partition", PARTITIONS)
@table(CASES)
def test_traced_gauss_newton_equals_the_dense_blocks(case: Case, partition: str) -> None:
    actual = linearized(GaussNewton(), case, partition, products=Traced())
    assert actual.error(dense_gauss_newton(case)) < RTOL


@table(ONE_PER_NETWORK)
def test_a_traced_hessian_equals_the_dense_blocks(case: Case) -> None:
    assert linearized(Hessian(), case, products=Traced()).error(dense_hessian(case)) < RTOL


@table(CASES)
def test_formed_blocks_equal_the_dense_blocks(case: Case) -> None:
    try:
        actual = linearized(GaussNewton(), case, products=Formed())
    except FormingError as error:
        pytest.skip(str(error))
    assert actual.error(dense_gauss_newton(case)) < RTOL
