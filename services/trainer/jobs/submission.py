"""What a submitted document must be before it becomes a job, and what people are told otherwise.

Each problem names the key, the value that was given and what is allowed. Everything that can be
checked without a model is checked here: a wrong path must not fail at step 300.
"""

import difflib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails
from pydantic_core.core_schema import definition_reference_schema, definitions_schema
from tokenizers import Tokenizer

from services.trainer.jobs.abilities import lacking
from services.trainer.jobs.shards import find_trouble
from services.trainer.recording import Recording, RecordingUnreadable
from services.trainer.warm_up import load_pairs
from shared.answers import MAX_SHOWN_CHARS, shown
from shared.data import DataError, load_rows
from shared.errors import TandemError
from shared.job import Job, expand_path
from shared.job_data import DataSection
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.layout import check_layout
from shared.refusals import fault
from shared.tokenizer import TOKENIZER_FILE

DATA_ROOT_VARIABLE = "DATA_ROOT"
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; `allowed` is what the message does not say, such as known keys."""

    key: str
    value: Any
    message: str
    allowed: Any = None

    def document(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "allowed" or value}


class Refused(TandemError):
    """The document is no job."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{one.key}: {one.message}" for one in problems))
        self.problems = list(problems)


@dataclass(frozen=True, slots=True)
class DescribedAs:
    """Has OpenAPI describe a document as a `model`, by which others read it, who know more."""

    model: type[BaseModel]

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # a body of its own, not written out here
        name = f"{self.model.__module__}.{self.model.__qualname__}:0"
        schema = definition_reference_schema(name)
        core = {**self.model.__pydantic_core_schema__, "ref": name}
        return handler(definitions_schema(schema, [core]))


def read_document(document: object) -> Job:
    """The job of a document; raises `Refused` with every problem of its form."""
    try:
        return Job.model_validate(document)
    except ValidationError as err:
        raise Refused([_problem(error) for error in err.errors()]) from err


def check_abilities(job: Job) -> Job:
    """The job, unless it asks for something that this build does not have."""
    problems = [Problem(key, _shown(value), reason) for key, value, reason in lacking(job)]
    if problems:
        raise Refused(problems)
    return job


def check_files(job: Job, roots: Sequence[Path]) -> Job:
    """The job with its paths absolute, once they and the data sets are found usable. Blocks."""
    places = _Places(roots)
    model = job.model
    model = model.model_copy(
        update={
            "rollout_checkpoint": places.checkpoint(
                "model.rollout_checkpoint", model.rollout_checkpoint
            ),
            "actor_checkpoint": places.folder("model.actor_checkpoint", model.actor_checkpoint),
        }
    )
    data = job.data
    if job.mode == "train_only":
        recording = places.recording("recording", job.recording)
        job = job.model_copy(update={"recording": recording})
    else:
        data = places.data("data", data)
    if job.warm_up is not None:
        path = places.pairs("warm_up.path", job.warm_up.path)
        job = job.model_copy(update={"warm_up": job.warm_up.model_copy(update={"path": path})})
    section = job.eval
    if section is not None:
        also = [
            one.model_copy(update={"data": places.data(f"eval.also.{place}.data", one.data)})
            for place, one in enumerate(section.also)
        ]
        own = places.data("eval.data", section.data)
        section = section.model_copy(update={"data": own, "also": also})
    if places.problems:
        raise Refused(places.problems)
    _check_layout(job, Path(model.rollout_checkpoint))
    return job.model_copy(update={"model": model, "data": data, "eval": section})


def _check_layout(job: Job, checkpoint: Path) -> None:
    """No process starts for a layout, or a loss of MTP blocks, that the model cannot have."""
    if job.layout.world == 1 and not job.actor.mtp_loss_weight:
        return
    try:
        check_layout(job, Architecture.load(checkpoint))
    except ValueError as err:
        shown = str(job.layout)
        raise Refused([Problem("actor", shown, str(err))]) from err


def allowed_roots(project: Path, configured: Iterable[Path]) -> list[Path]:
    """Folders that a job may name files of."""
    named = os.environ.get(DATA_ROOT_VARIABLE)
    roots = [project, *configured, *([Path(named)] if named else [])]
    return [root.expanduser().resolve() for root in roots]


class _Places:
    """Resolves paths and collects what is wrong with them."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self.problems: list[Problem] = []

    def checkpoint(self, key: str, given: str) -> str:
        path = self.folder(key, given)
        if path is None or not Path(path).is_dir():
            return given
        for name in (CONFIG_FILE, TOKENIZER_FILE):
            if not (Path(path) / name).is_file():
                self.refuse(key, given, f"there is no {name} in {path}")
                return path
        self._read(key, given, Path(path))
        if trouble := find_trouble(Path(path)):
            self.refuse(key, given, trouble)
        return path

    def folder(self, key: str, given: str | None) -> str | None:
        """None for none, and for one that no job may look into."""
        path = None if given is None else self._resolve(key, given)
        if path is None:
            return None
        if not path.is_dir():
            self.refuse(key, given, f"{path} is not a directory")
        return str(path)

    def recording(self, key: str, given: str | None) -> str | None:
        """The folder of a run that has one which can be opened."""
        path = self.folder(key, given)
        if path is not None:
            try:
                Recording.of_run(Path(path)).close()
            except RecordingUnreadable as err:
                self.refuse(key, given, str(err))
        return path

    def pairs(self, key: str, given: str) -> str:
        """Every pair is read, as every row of data is."""
        path = self._resolve(key, given)
        if path is None:
            return given
        try:
            load_pairs(path)
        except DataError as err:
            self.refuse(key, given, str(err))
        return str(path)

    def data(self, key: str, section: DataSection) -> DataSection:
        """Every row is read: the message names the file and the line of a bad one."""
        if section.path is not None:
            path = self._resolve(f"{key}.path", section.path)
            if path is None:
                return section
            section = section.model_copy(update={"path": str(path)})
        try:
            load_rows(section)
        except DataError as err:
            name = "path" if section.path is not None else "dataset"
            self.refuse(f"{key}.{name}", section.path or section.dataset, str(err))
        return section

    def _resolve(self, key: str, given: str) -> Path | None:
        """Symbolic links are followed before the path is judged."""
        try:
            path = expand_path(given).resolve()
        except ValueError as err:
            self.refuse(key, given, str(err))
            return None
        if not any(path.is_relative_to(root) for root in self._roots):
            roots = [str(root) for root in self._roots]
            message = f"{path} is outside the data roots; ${DATA_ROOT_VARIABLE} names one more"
            self.refuse(key, given, message, allowed=roots)
            return None
        return path

    def _read(self, key: str, given: str, checkpoint: Path) -> None:
        try:
            json.loads((checkpoint / CONFIG_FILE).read_text())
            Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
        except (ValueError, OSError) as err:
            self.refuse(key, given, f"{checkpoint} is no checkpoint: {fault(err)}")
        except Exception as err:
            if type(err) is not Exception:  # the tokenizers library raises plain Exception
                raise
            self.refuse(key, given, f"{checkpoint / TOKENIZER_FILE}: {err}")

    def refuse(self, key: str, value: Any, message: str, *, allowed: Any = None) -> None:
        self.problems.append(Problem(key, value, message, allowed))


def _problem(error: ErrorDetails) -> Problem:
    """A pydantic error in words for people."""
    key = ".".join(str(part) for part in error["loc"]) or "the document"
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(key, error)
    if kind == "missing":
        return Problem(key, None, "is required")
    value = _shown(error["input"])
    if kind == "value_error":
        return Problem(key, value, str(context["error"]))
    return Problem(key, value, error["msg"])  # which says the bound, pattern or choice itself


def _unknown_key(key: str, error: ErrorDetails) -> Problem:
    fields = _fields_at(error["loc"][:-1])
    near = difflib.get_close_matches(str(error["loc"][-1]), fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Problem(key, _shown(error["input"]), f"unknown key{hint}", fields)


def _fields_at(path: Sequence[int | str]) -> list[str]:
    """Keys of the section at `path` of the job document."""
    section: type[BaseModel] = Job
    for part in path:
        if isinstance(part, int):
            continue  # an entry of a list of sections
        annotation = section.model_fields[part].annotation
        candidates = (annotation, *get_args(annotation))
        section = next(
            one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)
        )
    return list(section.model_fields)


def _shown(value: Any) -> Any:
    """The value as given, if it is short and JSON has it."""
    if isinstance(value, str | int | float) or value is None:
        return shown(value)
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
