"""One settings class per service: defaults < TOML file < environment < flags.

`--config FILE` (or `TANDEM_CONFIG`) names the file; `ROLLOUT_ENGINE__DEVICE=cpu` and
`--engine.device cpu` set the same field. A key that no field has is an error wherever it stands,
and people get one sentence with the key, its value and what is allowed. Built directly, as tests
do, a settings class reads neither environment nor files.
"""

import difflib
import os
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.errors import ConfigInvalid
from shared.process import exit_with

S = TypeVar("S", bound=BaseSettings)
CONFIG_FILE_VARIABLE = "TANDEM_CONFIG"


class Part(BaseModel):
    """A component's own part of a service's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LogConfig(Part):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Events below this level are not written."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: a console for terminals, JSON lines otherwise."""

    @property
    def as_json(self) -> bool | None:
        return None if self.format == "auto" else self.format == "json"


class Settings(BaseSettings):
    """Strict settings that only `load_config` fills from outside."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def settings_of(service: str) -> SettingsConfigDict:
    """`model_config` of a service's settings class: how environment and flags are spelt."""
    return SettingsConfigDict(
        title=service,
        env_prefix=f"{service.upper()}_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        use_attribute_docstrings=True,
    )


class ServiceConfig(Settings):
    """What every service has; a service adds its own fields and gives `port` a default."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port to listen on."""
    advertise_url: str | None = None
    """How others reach this replica; default: http://host:port."""
    replica: str = ""
    """Name of this replica, stable over restarts; default: host name and port."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The broker."""
    drain_s: float = Field(20.0, ge=0)
    """How long work in progress may take to finish once a stop is asked for."""
    log: LogConfig = LogConfig()
    """Logging."""

    @property
    def url(self) -> str:
        everywhere = self.host in ("0.0.0.0", "::")  # noqa: S104  compared, not bound
        host = socket.gethostname() if everywhere else self.host
        return (self.advertise_url or f"http://{host}:{self.port}").rstrip("/")

    def url_at(self, port: int) -> str:
        """How others reach another port of this process."""
        return f"http://{urlsplit(self.url).hostname}:{port}"

    @property
    def name(self) -> str:
        return self.replica or f"{socket.gethostname()}-{self.port}"


def load_config(settings: type[S], argv: Sequence[str] | None = None) -> S:
    """The service's settings, or one sentence on stderr per wrong key and exit code 1."""
    try:
        return read_config(settings, sys.argv[1:] if argv is None else argv)
    except ConfigInvalid as err:
        exit_with(str(err))


def read_config(settings: type[S], argv: Sequence[str]) -> S:
    """`load_config` without its exit: raises `ConfigInvalid`."""
    path, flags = _split_config_flag(argv)
    document = _read_toml(path) if path else {}
    if path:
        _check_keys(settings, document, f"in {path}")
    _check_environment(settings)
    _check_flags(settings, flags)
    try:
        merged = _merge(document, _from_environment(settings), _from_flags(settings, flags))
        return settings(**merged)
    except ValidationError as err:
        raise ConfigInvalid(_sentences(settings, err)) from err
    except SettingsError as err:
        raise ConfigInvalid(f"{_title(settings)}: {err.__cause__ or err}.") from err


def _split_config_flag(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    flags: list[str] = []
    named = os.environ.get(CONFIG_FILE_VARIABLE)
    rest = iter(argv)
    for word in rest:
        if word == "--config":
            named = next(rest, "")
        elif word.startswith("--config="):
            named = word.removeprefix("--config=")
        else:
            flags.append(word)
    if named == "":
        raise ConfigInvalid("--config needs the path of a TOML file.")
    return (Path(named) if named else None), flags


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as err:
        raise ConfigInvalid(f"Cannot read the configuration {path}: {err.strerror}.") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigInvalid(f"{path} is not valid TOML: {err}.") from err


def _check_keys(model: type[BaseModel], document: Mapping[str, Any], where: str) -> None:
    for path, value in _leaves(document):
        _check_path(model, path, value, where)


def _check_environment(settings: type[BaseSettings]) -> None:
    prefix = str(settings.model_config.get("env_prefix", "")).upper()
    for variable, value in os.environ.items():
        if prefix and variable.upper().startswith(prefix):
            path = variable[len(prefix) :].lower().split("__")
            _check_path(settings, path, value, f"in the environment ({variable})")


def _check_flags(settings: type[BaseSettings], flags: Sequence[str]) -> None:
    for i, word in enumerate(flags):
        if word.startswith("--") and word != "--help":
            spelt, _, value = word[2:].partition("=")
            following = flags[i + 1] if i + 1 < len(flags) else ""
            path = spelt.replace("-", "_").split(".")
            _check_path(settings, path, value or following, f"on the command line (--{spelt})")


def _check_path(model: type[BaseModel], path: Sequence[str], value: Any, where: str) -> None:
    """Follow the path through nested models; the first part that is no field is refused."""
    for depth, part in enumerate(path):
        if part not in model.model_fields:
            raise ConfigInvalid(_unknown(model, ".".join(path[: depth + 1]), part, value, where))
        inner = _model_of(model.model_fields[part].annotation)
        if inner is None:
            return
        model = inner


def _unknown(model: type[BaseModel], key: str, part: str, value: Any, where: str) -> str:
    fields = list(model.model_fields)
    near = difflib.get_close_matches(part, fields, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"Unknown key {key} = {value!r} {where}: {hint}allowed here: {', '.join(fields)}."


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The settings model behind `Model` or `Model | None`; None for plain values."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _from_environment(settings: type[BaseSettings]) -> dict[str, Any]:
    return EnvSettingsSource(settings)()


def _from_flags(settings: type[BaseSettings], flags: Sequence[str]) -> dict[str, Any]:
    source: CliSettingsSource[Any] = CliSettingsSource(
        settings,
        cli_parse_args=list(flags),
        cli_exit_on_error=False,
        cli_kebab_case=True,
        cli_prog_name=f"python -m services.{_title(settings)}",
    )
    return source()


def _merge(*documents: Mapping[str, Any]) -> dict[str, Any]:
    """Later documents win, table by table."""
    merged: dict[str, Any] = {}
    for document in documents:
        for key, value in document.items():
            before = merged.get(key)
            nested = isinstance(before, dict) and isinstance(value, Mapping)
            merged[key] = _merge(before, value) if nested and before is not None else value
    return merged


def _leaves(document: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    found: list[tuple[list[str], Any]] = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            found += [([key, *path], leaf) for path, leaf in _leaves(value)]
        else:
            found.append(([key], value))
    return found


def _sentences(settings: type[BaseSettings], err: ValidationError) -> str:
    lines = []
    for error in err.errors():
        key = ".".join(str(part) for part in error["loc"]) or "the settings"
        given = "" if error["type"] == "missing" else f" = {error['input']!r}"
        lines.append(f"{_title(settings)}: {key}{given} is wrong: {error['msg']}.")
    return "\n".join(lines)


def _title(settings: type[BaseSettings]) -> str:
    return str(settings.model_config.get("title") or settings.__name__)
