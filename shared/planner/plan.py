"""The plan of a job on a machine: every stage's memory, the traffic, and whether it fits."""

from dataclasses import dataclass, replace

from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.layout import misfits, row_alignment
from shared.planner.memory import Stage
from shared.planner.setup import Machine, Setup
from shared.planner.traffic import Collective, collectives


@dataclass(frozen=True, slots=True)
class Plan:
    """Raises nothing: `problems` are sentences that name value and bound."""

    setup: Setup
    machine: Machine
    stages: tuple[Stage, ...] = ()
    traffic: tuple[Collective, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def headroom_bytes(self) -> int | None:
        """Of the fullest GPU; negative where it does not fit, None for an unknown machine."""
        usable = self.machine.usable_gpu_bytes
        return None if usable is None or not self.stages else usable - self.fullest.memory.total

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Needed on the host of each node, in order of nodes."""
        layout, per_node = self.setup.layout, self.machine.gpus_per_node
        totals = [stage.host.total for stage in self.stages]
        ranks = [totals[layout.stage_of(rank)] for rank in range(layout.world)]
        return tuple(sum(ranks[i : i + per_node]) for i in range(0, layout.world, per_node))

    @property
    def sent_bytes(self) -> int:
        """By the busiest rank in a step."""
        sent = [0] * len(self.stages)
        for one in self.traffic:
            sent[one.stage] += one.num_bytes
        return max(sent)


def plan(architecture: Architecture, job: Job, *, machine: Machine | None = None) -> Plan:
    """What `job` needs of each GPU and host, and the reasons why it cannot run on `machine`."""
    return plan_setup(architecture, Setup.of(job), machine or Machine())


def plan_setup(arch: Architecture, setup: Setup, machine: Machine) -> Plan:
    if problems := _misfits(arch, setup):
        return Plan(setup, machine, problems=problems)
    setup = replace(setup, row_alignment=row_alignment(setup.layout, arch))
    stages = tuple(Stage.of(arch, setup, number) for number in range(setup.layout.pipeline))
    traffic = tuple(one for stage in stages for one in collectives(arch, setup, stage))
    found = Plan(setup, machine, stages, traffic)
    return Plan(setup, machine, stages, traffic, tuple(_shortages(found)))


def _misfits(arch: Architecture, setup: Setup) -> tuple[str, ...]:
    """Why this model cannot be trained in this way at all: what a job's submission would say."""
    found = misfits(
        setup.layout,
        arch,
        mtp_loss_weight=setup.mtp_loss_weight,
        sample_tokens=setup.sample_tokens,
        max_tokens=setup.max_tokens,
        fp8=setup.fp8,
        rounds=setup.rounds,
    )
    return tuple(found)


def _shortages(found: Plan) -> list[str]:
    problems, machine = [], found.machine
    if found.headroom_bytes is not None and found.headroom_bytes < 0:
        stage = found.fullest
        problems.append(
            f"each GPU of stage {stage.number} needs {_gb(stage.memory.total)}, "
            f"{_gb(-found.headroom_bytes)} more than the {_gb(machine.usable_gpu_bytes or 0)} that "
            "can be used of it"
        )
    if machine.host_bytes is not None and max(found.host_bytes) > machine.host_bytes:
        needed = max(found.host_bytes)
        problems.append(
            f"the host of node {found.host_bytes.index(needed)} needs {_gb(needed)} for what is "
            f"offloaded, kept and saved there, {_gb(needed - machine.host_bytes)} more than it has"
        )
    return problems


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
