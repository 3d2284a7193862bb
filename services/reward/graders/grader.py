"""What a grader is, and which there are.

A grader is a function of a response and a gold. It returns a `Score` (at most 1e6 either way) or
`Unparseable`; whatever it raises (a ValueError: the gold is unusable) becomes an `error`. It may be
slow, hang, or eat memory: it runs in a pool worker that the pool kills. Modules are imported by
name, in workers only.
"""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from shared.messages import Score, Unparseable

Grader = Callable[[str, str], Score | Unparseable]

BUILT_IN: dict[str, str] = {
    "math": "services.reward.graders.math:grade",
    "aime": "services.reward.graders.aime:grade",
    "gsm8k": "services.reward.graders.integers:grade",
    "dapo": "services.reward.graders.integers:grade",
    "code": "services.reward.graders.code:grade",
    "format": "services.reward.graders.format:grade",
    "arithmetic": "services.reward.graders.arithmetic:grade",
}
HEAVY = {"math"}  # takes half a second to import, and so is loaded when first needed
_ADDRESS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def addresses(plug_ins: Mapping[str, str] | None = None) -> dict[str, str]:
    """Where each grader is found, by name; a plug-in may not take a built-in's name."""
    for name, address in (plug_ins or {}).items():
        if name in BUILT_IN:
            raise ValueError(f"plug-in {name!r} has the name of a built-in grader")
        if not _ADDRESS.fullmatch(address):
            raise ValueError(f"plug-in {name!r}: {address!r} is not module:function")
    return BUILT_IN | dict(plug_ins or {})


def load_grader(address: str) -> Grader:
    """Import the grader at `module:function`; ValueError or ImportError says why not."""
    module, _, function = address.partition(":")
    try:
        return cast(Grader, getattr(import_module(module), function))
    except AttributeError as err:
        raise ValueError(f"grader {address!r}: the module has no such function") from err
