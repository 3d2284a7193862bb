"""What a run was, computed from its own events.jsonl and from nothing else.

events -> summary (numbers) -> figures (PNG) and sentences (text) -> page (one self-contained file).
"""

from services.trainer.report.write import write_report

__all__ = ["write_report"]
