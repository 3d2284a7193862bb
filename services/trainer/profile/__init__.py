"""Profiles of a running job: what every process did in a few steps, and who waited for whom."""
