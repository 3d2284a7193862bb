"""Whether an image can carry Tandem's GPU services: a new enough Python that has torch and SGLang.

Standard library only, and readable by older Pythons: it is the part that tells what is missing.
"""

import importlib.util
import sys

MIN_PYTHON = (3, 11)
ADVICE = (
    "Name another one as SGLANG_IMAGE: SGLang's images for CUDA and for ROCm 7.2.4 have Python "
    "3.12, those for ROCm 7.0 and 7.2.0 have 3.10."
)


def main():
    if sys.version_info < MIN_PYTHON:
        wanted, have = (".".join(map(str, v[:2])) for v in (MIN_PYTHON, sys.version_info))
        sys.exit(f"Tandem needs Python {wanted} or newer; this base has {have}. {ADVICE}")
    lacking = [name for name in ("torch", "sglang") if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(f"This base lacks {', '.join(lacking)}. {ADVICE}")


if __name__ == "__main__":
    main()
