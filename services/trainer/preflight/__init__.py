"""What a job proves before it trains: memory, one policy on both sides, one update that is undone.

check -> memory (before anything is started) -> parity of every server -> dry_update -> findings
"""
