"""What the job proved before it trained, and where its drift comes from: two sections of the page.

Both are computed from the events `preflight_finished` and `drift_attributed`.
"""

from collections.abc import Iterable
from typing import Any

from services.trainer.report.sentences import number, percent

Row = Iterable[object]


def preflight_sentence(found: dict[str, Any] | None) -> str:
    if found is None:
        return "No preflight was made."
    told = "The preflight refused the job: " + "; ".join(map(str, found.get("problems") or []))
    if found.get("passed"):
        servers = len(found.get("parity") or [])
        seconds = number(found.get("seconds"))
        told = f"The preflight passed in {seconds} s; samplers that were compared: {servers}."
    untold = "; ".join(map(str, found.get("untold") or []))
    parts = (told, f"Not shown: {untold}." if untold else "", _memory(found.get("memory")))
    return " ".join(part for part in parts if part)


def _memory(plan: dict[str, Any] | None) -> str:
    if not plan:
        return ""
    largest = sorted(plan["parts"].items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in largest)
    available = plan.get("available")
    room = "" if available is None else f" of {_bytes(available)} available"
    return f"Memory planned: {_bytes(plan['needed'])}{room}, most of it {parts}."


PREFLIGHT_HEAD = (
    "server",
    "|Δ log p| rounding alike",
    "as the ranks train",
    "departs at",
    "dry update",
)

PREFLIGHT_COLUMNS = (
    "|Δ log p| is how far a server's log-probability of each token of the first prompts' "
    "completions is from the trainer's, on average: with both rounding alike, where little may "
    "remain, and as the ranks train, which is what the first step will see. Departs at: where in "
    "the model the two first differ, layer by layer. Dry update: the server takes an update and "
    "switches nothing; it must come to the checksum of what it serves."
)


def preflight_rows(found: dict[str, Any] | None) -> list[Row]:
    """One for each sampler that was compared."""
    dry = {one["server"]: one for one in (found or {}).get("dry_updates") or []}
    return [
        (
            one["server"],
            number(one["alike_mean"]),
            number(one["own_mean"]),
            one["departs_at"] or ("no walk" if one["walked"] is None else "nowhere"),
            _dry_update(dry.get(one["server"])),
        )
        for one in (found or {}).get("parity") or []
    ]


def _dry_update(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return "same checksum" if found["is_same"] else "ANOTHER checksum"


def attribution_sentence(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    whole, ranked = _over_steps(found)
    shares = [f"{name} {percent(part / whole)}" for name, part in ranked] if whole else []
    steps = f"the {len(found)} steps that were asked" if len(found) > 1 else "the step asked"
    if not shares:
        return f"Sampler and trainer agree on every token of {steps}: there is no drift."
    name, part = ranked[0]
    return (
        f"{name[0].upper()}{name[1:]} makes {percent(part / whole)} of the mean |Δ log p| "
        f"{number(whole)} over {steps}; then {', '.join(shares[1:])}. The same sampled tokens are "
        "scored again with one source more at a time: a source's part is what that moves their "
        "log-probabilities towards the sampler's. So the parts add up to the whole, one that moves "
        "away is negative, and the rest is what no source explains."
    )


def _over_steps(found: list[dict[str, Any]]) -> tuple[float, list[tuple[str, float]]]:
    """Means over all tokens that were asked: the whole, and its sources, the largest first."""
    weights = [float(one["num_tokens"]) for one in found]

    def mean(values: Iterable[float]) -> float:
        pairs = zip(weights, values, strict=True)
        return sum(weight * value for weight, value in pairs) / max(1.0, sum(weights))

    parts = {name: mean(one["parts"][name] for one in found) for name in found[-1]["parts"]}
    return mean(one["whole"] for one in found), sorted(parts.items(), key=lambda item: -item[1])


def attribution_head(found: list[dict[str, Any]]) -> Row:
    return ("step", "|Δ log p|", *(found[-1]["parts"] if found else ()), "explained")


def attribution_rows(found: list[dict[str, Any]]) -> list[Row]:
    """One for each step that was asked."""
    return [
        (
            one["step"],
            number(one["whole"]),
            *(number(part) for part in one["parts"].values()),
            percent(one["explained_share"]),
        )
        for one in found
    ]


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
