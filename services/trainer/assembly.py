"""What one job is run with, each part given what it needs of the others."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis

from services.trainer.admission import Admission, Progress
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.collector import Collector
from services.trainer.config import ConductorConfig
from services.trainer.drift import DriftAttribution
from services.trainer.evals import Evaluations
from services.trainer.events import EventLog, EventMaker, event_maker
from services.trainer.exports import Exporter
from services.trainer.feeder import Feeder
from services.trainer.keeper import RankKeeper, StartRanks
from services.trainer.load import LoadMeter
from services.trainer.metrics_file import MetricsFile
from services.trainer.preflight.check import NUM_PROMPTS, Preflight
from services.trainer.profile.session import Profiler
from services.trainer.prompts import PromptSource
from services.trainer.publisher import Publisher
from services.trainer.recording import RECORDING_FILE, Recording
from services.trainer.recovery import recover_books
from services.trainer.rollback import Rollback
from services.trainer.rounds import Rounds
from services.trainer.sampled_routes import SampledRoutes
from services.trainer.shown_samples import SampleShelf
from services.trainer.versions import VersionStore
from services.trainer.watch import Watch
from shared.http import HttpClient
from shared.job import Job, expand_path
from shared.weights.protocol import GroupTransfer


@dataclass(frozen=True, slots=True)
class Parts:
    job_id: str
    job: Job
    run_dir: Path
    trainer_url: str
    config: ConductorConfig
    redis: Redis
    books: Books
    record: EventLog
    events: EventMaker
    store: VersionStore
    admission: Admission
    progress: Progress
    source: PromptSource
    keeper: RankKeeper
    exporter: Exporter
    evals: Evaluations
    publisher: Publisher
    rollback: Rollback
    feeder: Feeder
    collector: Collector
    watch: Watch
    preflight: Preflight
    drift: DriftAttribution
    recording: Recording | None
    shelf: SampleShelf
    load: LoadMeter
    metrics: MetricsFile
    profiler: Profiler

    @property
    def doing(self) -> str:
        """What the job is at, in words for people."""
        told = (self.rollback.doing, self.progress.doing)
        return ", ".join(one for one in told if one)

    def close(self) -> None:
        """The run's files, each whatever the others say."""
        with ExitStack() as files:
            files.callback(self.books.close)
            files.callback(self.record.close)
            files.callback(self.shelf.close)
            if self.recording is not None:
                files.callback(self.recording.close)


def assemble(
    redis: Redis,
    *,
    source: PromptSource,
    run_dir: Path,
    start_ranks: StartRanks,
    http: HttpClient,
    trainer_url: str,
    shards_url: str,
    replica: str,
    config: ConductorConfig,
) -> Parts:
    """Open the run's files and connect the parts; nothing runs yet."""
    job_id, job = source.job_id, source.job
    admission, progress = Admission.of(job), Progress(job.steps)
    recover_books(run_dir)
    books = Books(run_dir / BOOKS_FILE)
    own: dict[str, Any] = {
        "books": books,
        "record": EventLog(run_dir, books),
        "events": event_maker(job_id, replica),
    }
    told = {"record": own["record"], "events": own["events"]}
    store = VersionStore(run_dir)
    recording = Recording(run_dir / RECORDING_FILE) if job.record else None
    keeper = RankKeeper(
        start_ranks,
        run_dir=run_dir,
        keep_checkpoints=job.checkpoint.keep_last,
        keep_every=job.checkpoint.keep_every,
        reference_step=job.warm_up.steps if job.warm_up and job.algorithm.kl.coefficient else None,
        **own,
    )
    evals = Evaluations(redis, job_id=job_id, job=job, grace_s=config.hold_grace_s, **own)
    publisher = Publisher(
        redis,
        job_id=job_id,
        trainer_url=trainer_url,
        shards_url=shards_url,
        store=store,
        update=job.update,
        http=http,
        holds=evals.holds,
        digest=keeper.effective_checksum,
        owners=lambda: keeper.owners,
        rounds=_rounds(job, keeper, store, trainer_url),
        needed_versions=evals.needed_versions,
        canary=config.canary,
        **told,
    )
    evals.on_hold = publisher.reconsider
    flow: dict[str, Any] = {"source": source, "admission": admission, "progress": progress}
    feeder = Feeder(redis, books=books, events=own["events"], **flow)
    routes = SampledRoutes.of(redis, job_id=job_id, job=job)
    beside: dict[str, Any] = {"feeder": feeder, "routes": routes, "recording": recording}
    collector = Collector(redis, name=replica, **beside, **flow, **own)
    feeder.held_ids = collector.held_ids
    watch = Watch(
        redis,
        job_id=job_id,
        books=books,
        feeder=feeder,
        collector=collector,
        quiet_s=config.quiet_s,
    )
    exporter = Exporter(
        keeper,
        store,
        books=books,
        update=job.update,
        prompts=source.probe_sequences(job.update.probe_sequences),
    )
    preflight = Preflight(
        job=job,
        checkpoint=expand_path(job.model.rollout_checkpoint),
        publisher=publisher,
        ranks=keeper,
        http=http,
        prompts=source.probe_sequences(NUM_PROMPTS),
        settle_grace_s=config.settle_grace_s,
        **own,
    )
    return Parts(
        job_id=job_id,
        job=job,
        run_dir=run_dir,
        trainer_url=trainer_url,
        config=config,
        redis=redis,
        store=store,
        admission=admission,
        progress=progress,
        source=source,
        keeper=keeper,
        exporter=exporter,
        evals=evals,
        publisher=publisher,
        rollback=Rollback(publisher, store, job_id=job_id, **own),
        feeder=feeder,
        collector=collector,
        watch=watch,
        preflight=preflight,
        drift=DriftAttribution(keeper, store, settings=job.attribution, **told),
        recording=recording,
        shelf=SampleShelf(run_dir),
        load=LoadMeter(),
        metrics=MetricsFile(run_dir, books),
        profiler=Profiler(redis, keeper, job_id=job_id, run_dir=run_dir, replica=replica),
        **own,
    )


def _rounds(job: Job, keeper: RankKeeper, store: VersionStore, trainer_url: str) -> Rounds | None:
    """How versions travel other than over HTTP."""
    if job.update.transport == "http":
        return None

    async def send(version: int, groups: Sequence[GroupTransfer]) -> str:
        return await keeper.send(store.path(version), groups)

    return Rounds(
        send,
        backend=job.update.transport,
        host=urlsplit(trainer_url).hostname or "127.0.0.1",
        deadline_s=job.update.deadline_s / 3,
    )
