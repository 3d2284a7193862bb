"""Every stream, consumer group and key name; a name such as "rollouts" appears nowhere else.

Names of one job carry the same `{job}` hash tag, so a Redis Cluster keeps a job in one slot.
"""

# Consumer groups of the work streams: who takes from them.
SAMPLERS = "samplers"
GRADERS = "graders"
TRAINERS = "trainers"
EVALUATORS = "evaluators"

# Not of one job: which job is active, and which replicas live.
JOB_CURRENT = "tandem:job:current"
JOB_CHANGES = "tandem:job:changes"
REPLICAS = "tandem:replicas"


def replica(service: str, name: str) -> str:
    """Key of one registered replica; it expires with its lease."""
    return f"tandem:replica:{service}:{name}"


def prompts(job_id: str) -> str:
    return _stream(job_id, "prompts")


def rollouts(job_id: str) -> str:
    return _stream(job_id, "rollouts")


def groups(job_id: str) -> str:
    return _stream(job_id, "groups")


def evals(job_id: str) -> str:
    return _stream(job_id, "evals")


def events(job_id: str) -> str:
    return _stream(job_id, "events")


def spans(job_id: str) -> str:
    """What services did while a profile was taken."""
    return _stream(job_id, "spans")


def weights_current(job_id: str) -> str:
    """Key of the WeightsAnnounced that late joiners read."""
    return _stream(job_id, "weights:current")


def holds(job_id: str) -> str:
    """Hash replica -> policy version that it must keep serving (an evaluation runs on it)."""
    return _stream(job_id, "holds")


def routes(job_id: str, group_id: str, digest: str) -> str:
    """Key of what the sampler of one group chose; `digest` is that of the value."""
    return _stream(job_id, f"routes:{group_id}:{digest}")


def all_routes(job_id: str) -> str:
    """Pattern of the routes' keys of one job."""
    return _stream(job_id, "routes:*")


def dead(stream: str) -> str:
    return f"{stream}.dead"


def _stream(job_id: str, name: str) -> str:
    return f"tandem:{{{job_id}}}:{name}"
