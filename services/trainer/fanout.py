"""Who sends a version to whom, so that the trainer's link does not grow with the servers.

    trainer ──> the first `max_sends` servers ──> the next ones, each from the server with the
                                                  fewest others so far, while that one still pulls

A server asks its parent, then whoever else has the version, the trainer last: a parent that dies,
or sends other bytes than the manifest says, costs a retry and no update.
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
    direct: dict[bool, set[str]] = field(default_factory=dict)  # sent by the trainer, by kind
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

        The trainer counts its sends of whole shards and of changes apart: they are other bytes.
        A server that failed asks the trainer first: a peer that sends too slowly is never found
        out by its bytes. With owners of parts those stand for the trainer, and are no part of the
        answer.
        """
        trainer = [] if has_owners else [self._trainer_url]
        known = self._versions.setdefault(version, _Version())
        direct = known.direct.setdefault(as_changes, set())
        peers = sorted(
            (
                one
                for other, one in known.holders.items()
                if other != name and (one.has_changes or not as_changes)
            ),
            key=lambda one: one.num_children,
        )
        may_ask = name in direct or name in known.failed or len(direct) < self._max_sends
        if may_ask or not peers:
            direct.add(name)
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
        for version in self._versions.values():
            version.holders.pop(name, None)
            for direct in version.direct.values():
                direct.discard(name)

    def note_served(self, version: int, name: str) -> None:
        """Its files of other versions are gone, or soon will be."""
        for other, known in self._versions.items():
            if other != version:
                known.holders.pop(name, None)

    def keep_only(self, versions: set[int]) -> None:
        self._versions = {one: known for one, known in self._versions.items() if one in versions}
