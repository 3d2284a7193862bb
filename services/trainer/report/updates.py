"""Weight updates as the events have them: a time line of the last ones, and what each moved."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.trainer.report.events import RunEvents

if TYPE_CHECKING:  # matplotlib costs half a second, which a process that reads events shall not pay
    from matplotlib.axes import Axes

PHASES = {
    "stage": "#2563eb",
    "wait": "#cbd5e1",
    "load": "#0891b2",
    "restore": "#059669",
    "probe": "#d97706",
    "pause": "#dc2626",
    "resume": "#be185d",
}
MAX_BARS = 12


@dataclass(frozen=True, slots=True)
class Update:
    """One committed update of one server. `seconds` by phase, in the order of PHASES; none is in
    two of them."""

    server: str
    policy_version: int
    began_at_s: float
    seconds: dict[str, float]
    pulled_share: float | None  # of the version's bytes
    probe_delta: float | None


def committed_updates(run: RunEvents) -> list[Update]:
    """In order of their beginnings; those of runs before there were phases are left out."""
    found = []
    for event in run.named("update_committed"):
        fields = event.fields
        if "began_at_s" not in fields:
            continue
        seconds = {name: float(fields.get(f"{name}_s") or 0.0) for name in PHASES}
        if fields.get("proven_in_pause"):
            seconds["pause"] -= seconds["restore"] + seconds["probe"]
        seconds["wait"] = max(0.0, float(fields["seconds"]) - sum(seconds.values()))
        pulled, whole = fields.get("pulled_bytes"), fields.get("bytes")
        found.append(
            Update(
                server=str(fields["server"]),
                policy_version=int(fields["policy_version"]),
                began_at_s=float(fields["began_at_s"]),
                seconds=seconds,
                pulled_share=pulled / whole if whole and pulled is not None else None,
                probe_delta=fields.get("probe_mean_abs_delta"),
            )
        )
    return sorted(found, key=lambda one: one.began_at_s)


def draw_timeline(axes: "Axes", updates: list[Update]) -> None:
    """The last updates, each from its own beginning: pauses would be invisible on a run's clock."""
    shown = updates[-MAX_BARS:]
    left = [0.0] * len(shown)
    for name, colour in PHASES.items():
        widths = [one.seconds[name] for one in shown]
        if any(widths):
            axes.barh(range(len(shown)), widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    names = [f"version {one.policy_version}, {one.server}" for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    axes.invert_yaxis()
    axes.locator_params(axis="x", integer=False)
    axes.set_xlabel("seconds since the update began")


def draw_shares(axes: "Axes", updates: list[Update]) -> None:
    """What servers pulled, and how far the probe was from the trainer, by version."""
    pulled = {one.policy_version: one.pulled_share for one in updates}
    _points(axes, pulled, "o", "#2563eb", "share of the bytes pulled")
    axes.set_xlabel("version")
    axes.set_ylim(bottom=0)
    probed = {one.policy_version: one.probe_delta for one in updates}
    if any(value is not None for value in probed.values()):
        axes.plot([], [], "x", ms=3.5, color="#d97706", label="probe's mean |Δ log p|, right axis")
        right = axes.twinx()
        right.spines[["top", "left"]].set_visible(False)
        right.spines[["right", "bottom"]].set_color("#94a3b8")
        right.tick_params(colors="#334155")
        _points(right, probed, "x", "#d97706", "")
        right.set_ylim(bottom=0)


def _points(
    axes: "Axes", values: dict[int, float | None], marker: str, colour: str, label: str
) -> None:
    known = {version: value for version, value in values.items() if value is not None}
    if known:
        axes.plot(list(known), list(known.values()), marker, ms=3.5, color=colour, label=label)
