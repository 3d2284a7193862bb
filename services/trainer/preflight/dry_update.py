"""One update of the weights that a server serves already, up to the switch, which is left out."""

import time

from services.trainer.preflight.findings import DryUpdate
from services.trainer.transactions import Transaction
from shared.errors import HttpFailed
from shared.weights.protocol import CommitUpdate, Probe

NOT_ABLE = (404, 405, 501)


async def dry_update(
    transaction: Transaction, *, server: str, policy_version: int, probe: Probe | None
) -> DryUpdate | None:
    """Load, restore and probe once more; None for an engine that cannot.

    Raises `HttpFailed` with the server's reason when a commit would be refused.
    """
    began_s = time.monotonic()
    try:
        result = await transaction.rehearse(policy_version, CommitUpdate(probe=probe))
    except HttpFailed as err:
        if err.status in NOT_ABLE:
            return None
        raise
    served = await transaction.effective_checksum()
    return DryUpdate(
        server=server,
        seconds=time.monotonic() - began_s,
        probe_mean_abs_delta=result.probe_mean_abs_delta,
        is_same=result.effective_checksum == served,
    )
