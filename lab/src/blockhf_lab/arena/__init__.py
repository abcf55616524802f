"""The arena: optimizers over a fixed set of small tasks, each to three targets, within equal CPU seconds.

``tasks`` has the tasks, ``families`` the optimizers and the equal search, ``training`` makes one run,
``runner`` many, ``scores`` judges their records, and ``page`` shows them (docs/arena.md).
``variants`` has the default in other circumstances and without its parts, ``variants_page`` their tables.
"""
