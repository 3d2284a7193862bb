"""The published versions of one run, as directories; one without a manifest is unfinished.

weights/v00000003/{shard-00000.bin, ..., manifest.json}   written by the ranks, manifest last
                  probe.json                              beside it, written by the conductor
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.weights.manifest import MANIFEST_FILE, Manifest, shard_file
from shared.weights.protocol import Probe

PROBE_FILE = "probe.json"


class VersionStore:
    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "weights"
        self._root.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        return self._root / f"v{version:08d}"

    def fresh_path(self, version: int) -> Path:
        """Where to export `version`; what an interrupted export left there is removed."""
        path = self.path(version)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for an export that is only looked at."""
        path = self._root / "scratch"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        yield path
        shutil.rmtree(path)

    def same_weights(self, version: int, path: Path) -> bool:
        """Whether an export in `path` holds the same bytes as `version`, tensor by tensor."""
        published = self.manifest(version)
        other = Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes())
        return published is not None and _checksums(published) == _checksums(other)

    def versions(self) -> list[int]:
        """Finished versions, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self._root.glob(f"v*/{MANIFEST_FILE}"))

    def manifest(self, version: int) -> Manifest | None:
        """None for a version that is unfinished or gone."""
        path = self.path(version) / MANIFEST_FILE
        return Manifest.model_validate_json(path.read_bytes()) if path.exists() else None

    def shard(self, version: int, index: int) -> Path | None:
        path = self.path(version) / shard_file(index)
        finished = (self.path(version) / MANIFEST_FILE).exists()
        return path if finished and path.exists() else None

    def keep_probe(self, version: int, probe: Probe) -> None:
        path = self.path(version) / PROBE_FILE
        scratch = path.with_suffix(".tmp")
        scratch.write_text(probe.model_dump_json())
        scratch.replace(path)

    def probe(self, version: int) -> Probe | None:
        path = self.path(version) / PROBE_FILE
        return Probe.model_validate_json(path.read_bytes()) if path.exists() else None

    def delete_all_but(self, needed: Iterable[int], *, keep_last: int) -> list[int]:
        """Delete versions that are neither needed nor among the newest; which they were."""
        versions = self.versions()
        kept = {*needed, *versions[-keep_last:]}
        gone = [version for version in versions if version not in kept]
        for version in gone:
            (self.path(version) / MANIFEST_FILE).unlink()  # first: it is not offered any more
            shutil.rmtree(self.path(version))
        return gone


def _checksums(manifest: Manifest) -> dict[str, str]:
    return {tensor.name: tensor.checksum for tensor in manifest.tensors}
