"""Grading in processes that can be killed.

    service ──control──> zygote (graders imported once) ──fork──> worker, worker, ...
       └───────── one socket and one shared page each ──────────────┘

A fork costs milliseconds where a fresh process would import sympy for half a second, so a worker
that has to be killed is replaced at once.
"""
