"""Turns ranks that stand still into a diagnosis.

    every rank ──beacon──> watchdog/rank3.json ──> watch (outside the ranks) ──> stall?
        └────dump <──────── watchdog/dump.request <─────────────┘
        └────trace, stack ─> diagnosis ──> report: the collective, who waits, who is missing

Ranks and watch meet in a folder of the run, so that it works across nodes and needs no rank's help.
"""
