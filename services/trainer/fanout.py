"""Who sends a version to whom, so that the trainer's link does not grow with the servers.

    trainer ──> the first `max_sends` servers ──> the next ones, each from the server with the
                                                  fewest others so far, while that one still pulls

A server asks its parent, then whoever else has the version, the trainer last: a parent that dies,
or sends other bytes than the manifest says, costs a retry and no update. A version has one count of
sends, whether shards go whole or as changes: a server that takes changes takes a shard without any
whole.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Holder:
    """A server that has a version or is getting it."""

    url: str
    has_changes: bool  # also what it was rebuilt from
    num_children: int = 0


@dataclass(slots=True)
class _Version:
    holders: dict[str, _Holder] = field(default_factory=dict)
    direct: set[str] = field(default_factory=set)  # servers that ask the trainer first
    num_sends: int = 0  # by the trainer, also to servers that are gone
    failed: set[str] = field(default_factory=set)  # servers that peers could not help


class Fanout:
    def __init__(self, trainer_url: str, *, max_sends: int) -> None:
        self._trainer_url = trainer_url
        self._max_sends = max_sends
        self._versions: dict[int, _Version] = {}

    def sources(
        self, version: int, name: str, url: str, *, as_changes: bool, has_owners: bool = False
    ) -> list[str]:
        """Where server `name` (its shards at `url`, or empty) is to pull the version from.

        A server that takes changes comes to the trainer for those that no other server has, and
        for whole shards to the others first. A server that failed asks the trainer first: a peer
        that sends too slowly is never found out by its bytes. With owners of parts those stand for
        the trainer, and are no part of the answer.
        """
        trainer = [] if has_owners else [self._trainer_url]
        known = self._versions.setdefault(version, _Version())
        peers = sorted(
            (one for other, one in known.holders.items() if other != name),
            key=lambda one: (as_changes and not one.has_changes, one.num_children),
        )
        is_direct = name in known.direct
        if is_direct or name in known.failed or known.num_sends < self._max_sends or not peers:
            known.direct.add(name)
            known.num_sends += not is_direct
            found = [*trainer, *(one.url for one in peers if trainer)]
        else:
            peers[0].num_children += 1
            found = [*(one.url for one in peers), *trainer]
        if url:
            known.holders[name] = _Holder(url, as_changes)
        return found

    def note_failed(self, version: int, name: str) -> None:
        """The server does not have the version."""
        if version in self._versions:
            self._versions[version].holders.pop(name, None)
            self._versions[version].failed.add(name)

    def forget_server(self, name: str) -> None:
        """What it was sent stays sent: started again, it asks the others first."""
        for version in self._versions.values():
            version.holders.pop(name, None)
            version.direct.discard(name)
            version.failed.discard(name)

    def note_served(self, version: int, name: str) -> None:
        """Its files of other versions are gone, or soon will be."""
        for other, known in self._versions.items():
            if other != version:
                known.holders.pop(name, None)

    def keep_only(self, versions: set[int]) -> None:
        self._versions = {one: known for one, known in self._versions.items() if one in versions}
