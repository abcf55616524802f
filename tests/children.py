"""Tests that start processes: how long these may take where others keep the machine busy."""

from __future__ import annotations

import pytest

PATIENCE = 800.0
"""Seconds; a process that is still at work then hangs."""

starts_processes = pytest.mark.timeout(PATIENCE + 100)
