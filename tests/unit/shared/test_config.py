"""Order of sources, and what people read when a key is wrong."""

from pathlib import Path

import pytest
from pydantic import Field

from shared.config import Part, ServiceConfig, load_config, read_config, settings_of
from shared.errors import ConfigInvalid


class Optim(Part):
    lr: float = Field(1e-4, gt=0)
    """Learning rate."""


class TrialConfig(ServiceConfig):
    model_config = settings_of("trial")

    port: int = Field(8123, ge=0)
    optim: Optim = Optim()
    names: list[str] = Field(default_factory=list)
    limit: int | None = None


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("TANDEM_CONFIG", raising=False)


def read(argv=(), environ=None, monkeypatch=None):
    for key, value in (environ or {}).items():
        monkeypatch.setenv(key, value)
    return read_config(TrialConfig, argv)


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path, monkeypatch):
    file = tmp_path / "trial.toml"
    file.write_text("port = 1\ndrain_s = 1\nhost = '::1'\n[optim]\nlr = 1e-1\n")
    environ = {"TRIAL_PORT": "2", "TRIAL_DRAIN_S": "2"}
    config = read(["--config", str(file), "--port", "3"], environ, monkeypatch)
    assert (config.port, config.drain_s, config.host) == (3, 2.0, "::1")
    assert (config.optim.lr, config.log.level) == (0.1, "INFO")


def test_nested_fields_by_flag_and_environment(monkeypatch):
    assert read(["--optim.lr", "1e-6", "--drain-s=4"]).optim.lr == 1e-6
    assert read([], {"TRIAL_OPTIM__LR": "0.5"}, monkeypatch).optim.lr == 0.5
    assert read(["--names", "a", "--names", "b"]).names == ["a", "b"]


def test_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch):
    file = tmp_path / "trial.toml"
    file.write_text("port = 7\n")
    assert read([], {"TANDEM_CONFIG": str(file)}, monkeypatch).port == 7


@pytest.mark.parametrize(
    ("argv", "toml", "environ", "sentence"),
    [
        (
            ["--optm.lr", "3"],
            "",
            {},
            "Unknown key optm = '3' on the command line (--optm.lr): did you mean optim? "
            "allowed here: host, port, advertise_url, replica, redis_url, drain_s, log, optim, "
            "names, limit.",
        ),
        (
            [],
            "[optim]\nlrr = 3\n",
            {},
            "Unknown key optim.lrr = 3 in {file}: did you mean lr? allowed here: lr.",
        ),
        (
            [],
            "",
            {"TRIAL_OPTIM__RATE": "9"},
            "Unknown key optim.rate = '9' in the environment (TRIAL_OPTIM__RATE): "
            "allowed here: lr.",
        ),
        (["--optim.lr", "-1"], "", {}, "trial: optim.lr = '-1' is wrong: Input should be greater"),
        (["--port", "many"], "", {}, "trial: port = 'many' is wrong: Input should be a valid int"),
        (["--port"], "", {}, "trial: error parsing CLI: argument --port: expected one argument."),
        (["stray"], "", {}, "trial: error parsing CLI: unrecognized arguments: stray."),
        ([], "port = = 3", {}, "{file} is not valid TOML:"),
        (["--log.level", "LOUD"], "", {}, "trial: log.level = 'LOUD' is wrong: Input should be 'D"),
    ],
)
def test_wrong_key_is_one_sentence(argv, toml, environ, sentence, tmp_path, monkeypatch):
    file = tmp_path / "trial.toml"
    file.write_text(toml)
    with pytest.raises(ConfigInvalid) as caught:
        read(["--config", str(file), *argv], environ, monkeypatch)
    assert str(caught.value).startswith(sentence.format(file=file))
    assert "\n" not in str(caught.value)


def test_missing_file_is_named():
    with pytest.raises(ConfigInvalid, match=r"Cannot read the configuration nowhere.toml: No such"):
        read(["--config", "nowhere.toml"])


def test_load_config_ends_the_process_with_the_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        load_config(TrialConfig, ["--bogus", "1"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("Unknown key bogus = '1' on the command line")


def test_help_shows_the_fields_docstrings(capsys):
    with pytest.raises(SystemExit) as ended:
        load_config(TrialConfig, ["--help"])
    assert ended.value.code == 0
    assert "Learning rate." in capsys.readouterr().out


def test_settings_built_directly_ignore_the_environment(monkeypatch):
    monkeypatch.setenv("TRIAL_PORT", "9")
    assert TrialConfig().port == 8123


def test_urls_and_names_have_working_defaults():
    config = TrialConfig(port=8123)
    assert config.url == "http://127.0.0.1:8123"
    assert config.name.endswith("-8123")
    assert TrialConfig(replica="r0", advertise_url="http://far:1/").url == "http://far:1"
